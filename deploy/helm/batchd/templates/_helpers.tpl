{{- /* The name of all objects: that of the release, with the chart's if it lacks it. */ -}}
{{- define "batchd.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end -}}
{{- trunc 50 $name | trimSuffix "-" -}}
{{- end -}}

{{- define "batchd.labels" -}}
{app.kubernetes.io/name: batchd, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end -}}

{{- define "batchd.workerLabels" -}}
{app.kubernetes.io/name: batchd-workers, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end -}}

{{- define "batchd.image" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end -}}

{{- /* Whether the daemon needs keys: for trainers on other nodes, or for workers. */ -}}
{{- define "batchd.hasKeys" -}}
{{- if or .Values.remote.enabled .Values.workers.enabled }}yes{{ end -}}
{{- end -}}

{{- /* The field of a port that becomes a range with several gateways. */ -}}
{{- define "batchd.workerPorts" -}}
{port: 7072, {{ if gt (int .Values.workers.gateways) 1 }}endPort: {{ add 7071 .Values.workers.gateways }}, {{ end }}protocol: TCP}
{{- end -}}

{{- /* Mounts and volumes of samples. */ -}}
{{- define "batchd.dataMounts" -}}
{{- range .Values.data }}
- {name: {{ .name }}, mountPath: {{ .path }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "batchd.dataVolumes" -}}
{{- range .Values.data }}
- name: {{ .name }}
{{ toYaml .volume | indent 2 }}
{{- end }}
{{- end -}}
