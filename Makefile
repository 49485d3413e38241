# One command each, the same for people, hooks and CI. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STAMP  := $(VENV)/.ready
COMPILED := $(VENV)/.tests-compiled
WRITING := env -u PYTHONDONTWRITEBYTECODE # bytecode of pytest, too, which otherwise is made in each lane
TORCH  ?= torch==2.13.0
FRAMEWORKS := build/frameworks-venv
RAY := build/ray-venv
ADAPTERS := $(wildcard client/batchd_client/torch client/batchd_client/lightning.py client/batchd_client/jax* client/batchd_client/tensorflow*)
FRAMEWORK_EXAMPLES := $(wildcard examples/torch_*.py examples/jax_*.py examples/keras_*.py examples/tensorflow_*.py)
FRAMEWORK_TESTS := $(filter-out tests/with_browser tests/with_ray,$(wildcard tests/with_*))
PYTEST := $(WRITING) $(BIN)/python -m pytest
TESTS := tests/faults tests/with_torch tests/process tests/unit
ENDS := tests/unit $(addprefix tests/process/test_,golden.py positions.py init.py)
SMOKE := $(addprefix tests/process/test_,init.py killed_runs.py positions.py demo.py)
LANES ?= 8
IN_LANES = $(PYTEST) $(TESTS) -n $(LANES) --dist loadfile --no-loadscope-reorder --durations 20
SECONDS ?= 60
SEED ?= 1
FAULTS ?=
ROUNDS ?= 3
LIBJPEG ?= -ljpeg
PREFIX ?= /usr/local
DEB_PYTHON ?= /usr/bin/python3
LOCK := constraints.txt
GROUPS := dev docs frameworks packages page peers ray release wheels
BUILD := PIP_CONSTRAINT=$(CURDIR)/$(LOCK) $(BIN)/python -m build
PIP_INSTALL := -m pip install -qq --constraint $(LOCK)
# as an installation has it, also where PYTHONDONTWRITEBYTECODE is set: a daemon starts in two thirds of the time
COMPILE := $(BIN)/python -m compileall -q batchd client/batchd_client client/batchd_wire tests/support
# ARGS for pytest: paths in it choose what runs, else all of $(1) does, with the options of ARGS.
chosen = $(if $(filter tests/% %.py,$(subst ::, ,$(ARGS))),,$(1)) $(ARGS)
PLACES = PYTHON='$(PYTHON)' PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' SYSCONFDIR='$(SYSCONFDIR)' WHEELS='$(WHEELS)' EXTRAS='$(EXTRAS)'
CLASSICS := generator_enqueuer file_list tfrecords glob_imread process_pool queue_runner

.DEFAULT_GOAL := help
.PHONY: help venv setup bytecode demo demo-cluster classics test test-all smoke test-slow chaos torch test-torch test-page pictures test-frameworks test-moving test-ray test-wheels test-systemd test-ends lock fuzz-jpeg fuzz-pixels exhaust check format docs site bench bench-peers bench-pool-peers profile wheels dist clean
.PHONY: gates install uninstall wheelhouse deb manifests test-packages test-image

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

venv: $(INSTALLED) ## Make .venv with both distributions alone, to use them here

setup: $(STAMP) ## Make .venv with both distributions and the tools for tests, checks and docs

$(INSTALLED): $(LOCK) pyproject.toml client/pyproject.toml setup.py batchd/runtime/compiled.py $(wildcard batchd/data/pipeline/_*.[ch] batchd/data/storage/_*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "batchd needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "$(PYTHON) lacks the venv module. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "an environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP_INSTALL) --upgrade pip
	@echo "batchd, with its extensions compiled where libjpeg-turbo is installed (half a minute or so)"
	@$(BIN)/python $(PIP_INSTALL) --build-constraint $(LOCK) --editable ./client --editable .
	@touch $@

$(STAMP): $(INSTALLED)
	@echo "the tools for tests and docs (half a minute or so)"
	@$(BIN)/python $(PIP_INSTALL) --group dev
	@touch $@

bytecode: setup
	@$(COMPILE)

demo: $(INSTALLED) ## Serve photographs to two trainers and draw a batch (DATA=/path/to/images)
	@$(COMPILE)
	@$(BIN)/batchd demo $(if $(DATA),--data '$(DATA)')

demo-cluster: bytecode ## Let two nodes (of a Ray cluster, after make test-ray) help a slow daemon, kill one, and compare all bytes (DATA=/path/to/images)
	@$(if $(wildcard $(RAY)/.ready),$(RAY)/bin/python,$(BIN)/python) examples/demo_cluster.py $(if $(DATA),--data '$(DATA)')

classics: setup ## Measure six old ways of feeding data against batchd (DATA=/path/to/images)
	@for example in $(CLASSICS); do $(BIN)/python examples/classics/$$example.py $(if $(DATA),--data '$(DATA)') || exit; echo; done

$(COMPILED): $(STAMP) $(wildcard $(TESTS:%=%/test_*.py) tests/unit/*/test_*.py tests/unit/*/*/test_*.py) # compiled by pytest once, and not by each lane
	@$(WRITING) $(BIN)/python -m pytest -qq --collect-only $(filter %.py,$?) >/dev/null || true # `make test` says what fails
	@touch $@

test: bytecode $(COMPILED) ## Run the tests (some five minutes on 2 cores; ARGS for pytest, which then runs in one process)
	$(if $(ARGS),$(PYTEST) -m 'not slow and not jobs' $(call chosen,$(TESTS)),$(IN_LANES) -m 'not slow and not jobs$(if $(ALL),, and not thorough)')

test-all: ## Run these and the thorough tests: campaigns, streams through pools, crowds, cables, clusters (twice as long)
	$(MAKE) test ALL=1

smoke: bytecode ## Try the parts together: first configuration, demo, positions after kills (half a minute)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow' $(SMOKE)

test-slow: bytecode ## Run the long tests too (soak, big fuzz)
	$(BIN)/python -m pytest -m slow -n $(LANES) --dist loadfile --durations 20 $(ARGS)

chaos: bytecode ## Kill, stop and change everything at random while trainers read, and check all they get (SECONDS, FAULTS, SEED)
	@cd tests && ../$(BIN)/python -m chaos --seconds '$(if $(FAULTS),86400,$(SECONDS))' --seed '$(SEED)' $(if $(FAULTS),--faults '$(FAULTS)')

torch: setup ## Install PyTorch into .venv, so that `make test` tests its adapter too (TORCH: what pip installs)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)

test-torch: torch ## Run the tests of the PyTorch adapter alone
	$(BIN)/python -m pytest -m 'not slow' $(call chosen,tests/with_torch)

test-page: setup ## Run the tests of the page in a real browser (apt-get install chromium); pictures into build/page
	@$(BIN)/python -c 'import playwright' 2>/dev/null || $(BIN)/python $(PIP_INSTALL) --group page
	$(BIN)/python -m pytest -m 'not slow' $(call chosen,tests/with_browser)

pictures: setup ## Draw the pictures of README and docs: page, top, why, a batch (Chromium; as root, or where users may make namespaces)
	@$(BIN)/python $(PIP_INSTALL) --group page
	@unshare --map-root-user --uts --net --mount --pid --fork --mount-proc --kill-child sh -euc \
		'hostname bigbox; ip link set lo up; mount -t tmpfs pictures /srv; $(BIN)/python tools/draw_pictures.py'

test-frameworks: $(FRAMEWORKS)/.ready ## Run the tests of all adapters with their frameworks, and look at their types
	@for folder in $(or $(filter tests/%,$(ARGS)),$(FRAMEWORK_TESTS)); do \
		$(FRAMEWORKS)/bin/python -m pytest -m 'not slow' $$folder $(filter-out tests/%,$(ARGS)) || exit; done
	$(FRAMEWORKS)/bin/mypy
	@for example in $(FRAMEWORK_EXAMPLES); do $(FRAMEWORKS)/bin/mypy $$example || exit; done
	$(FRAMEWORKS)/bin/pyright --pythonpath $(FRAMEWORKS)/bin/python $(ADAPTERS) $(FRAMEWORK_EXAMPLES)

$(FRAMEWORKS)/.ready: $(LOCK) pyproject.toml client/pyproject.toml
	rm -rf $(FRAMEWORKS) && $(PYTHON) -m venv $(FRAMEWORKS)
	@echo "making $(FRAMEWORKS) (some minutes, and some gigabytes)"
	@$(FRAMEWORKS)/bin/python $(PIP_INSTALL) --upgrade pip
	@$(FRAMEWORKS)/bin/python -m pip install -qq $(TORCH)
	@$(FRAMEWORKS)/bin/python $(PIP_INSTALL) --build-constraint $(LOCK) --editable ./client --editable . --group dev --group frameworks
	@touch $@

test-moving: bytecode ## Compare the programs of docs/moving with DALI and FFCV, and samples with LeRobot's (g++, pkg-config, libopencv-dev, libturbojpeg0-dev)
	@PYTHONPATH=benchmarks/peers $(BIN)/python -c 'import environments, sys; sys.exit(bool(environments.make(["dali-torch", "ffcv", "lerobot"])))'
	$(BIN)/python -m pytest $(call chosen,tests/process/test_moving.py tests/process/test_lerobot.py)

test-ray: $(RAY)/.ready ## Run the tests of the pool on clusters of Ray, in a network namespace with a loopback alone
	$(RAY)/bin/mypy --follow-imports silent batchd/pool/ray
	unshare --map-root-user --net --pid --fork --mount --mount-proc --kill-child sh -euc 'ip link set lo up; mkdir -p /tmp/ray; \
		mount -t tmpfs ray /tmp/ray; mount -t tmpfs ray /dev/shm; $(RAY)/bin/python -m pytest $(call chosen,tests/with_ray) || exit'

$(RAY)/.ready: $(LOCK) pyproject.toml client/pyproject.toml
	rm -rf $(RAY) && $(PYTHON) -m venv $(RAY)
	@echo "making $(RAY) (some minutes)"
	@$(RAY)/bin/python $(PIP_INSTALL) --upgrade pip
	@$(RAY)/bin/python $(PIP_INSTALL) --build-constraint $(LOCK) --editable ./client --editable '.[ray]' --group dev --group ray
	@touch $@

test-wheels: wheels ## Run the process and fault tests against the installed wheels
	rm -rf build/wheel-venv && $(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python $(PIP_INSTALL) --upgrade pip
	build/wheel-venv/bin/python $(PIP_INSTALL) --find-links dist "$$(echo dist/batchd-*.whl)[arrow,cloud,lmdb,sound,text,tfrecord,video]" pytest hypothesis moto flask flask-cors py-partiql-parser
	cd tests && $(CURDIR)/build/wheel-venv/bin/python -m pytest -c ../pyproject.toml --rootdir .. -m 'not slow' $(patsubst tests/%,%,$(call chosen,tests/process tests/faults))

fuzz-jpeg: setup ## Throw broken JPEGs at the extension, under AddressSanitizer (SECONDS, SEED, LIBJPEG=/path/to/libjpeg.a)
	$(BIN)/python tests/fuzz/jpeg_files.py build/fuzz/jpeg
	gcc -std=gnu11 -O1 -g -Wall -Wextra -fno-pie -no-pie -fsanitize=address,undefined -fno-sanitize-recover=undefined \
		-I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') -Wl,--unresolved-symbols=ignore-all,-z,lazy \
		tests/fuzz/jpeg.c $(patsubst %,batchd/data/pipeline/_jpeg_%.c,cut probe splice transcode walk) $(LIBJPEG) -o build/fuzz/jpeg-fuzz
	cd build/fuzz && ./jpeg-fuzz $(SECONDS) $(SEED) jpeg/*.jpg

fuzz-pixels: setup ## Call the extensions for pixels, sound and words with arguments of all kinds, under AddressSanitizer (SECONDS, SEED)
	@mkdir -p build/fuzz
	for name in _pixels _sound _words; do \
		gcc -std=c11 -O1 -g -Wall -Wextra -shared -fPIC -fsanitize=address,undefined -fno-sanitize-recover=undefined \
			-I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') batchd/data/pipeline/$$name*.c -o build/fuzz/$$name.abi3.so || exit 1; done
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		$(BIN)/python tests/fuzz/pixels.py build/fuzz/_pixels.abi3.so build/fuzz/_sound.abi3.so build/fuzz/_words.abi3.so $(SECONDS) $(SEED)

exhaust: bytecode ## Let calls fail that take descriptors, memory or threads, and count what becomes of it (strace; ROLES, CALLS, ERRORS, SAMPLES)
	$(BIN)/python tests/exhaust/exhaust.py $(if $(ROLES),--roles $(ROLES)) $(if $(CALLS),--calls $(CALLS)) $(if $(ERRORS),--errors $(ERRORS)) $(if $(SAMPLES),--samples $(SAMPLES))

test-systemd: wheels ## Run the unit under a real systemd, in a container (as root; needs systemd-container and debootstrap)
	$(BIN)/python -m pytest -m systemd $(call chosen,tests/systemd)

gates: setup ## Run all targets that need root, packages or an environment of their own (hours); notes the results in CONTRIBUTING.md (ONLY=name,name)
	@$(BIN)/python tools/gates.py $(if $(ONLY),--only '$(ONLY)')

check: setup ## Lint, format check, types, import contracts, length of prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py --prose

lock: $(STAMP) ## Write constraints.txt: the newest version of all that develops and tests, for each Python (the environments follow)
	@mkdir -p build
	@echo 'batchd-client @ file://$(CURDIR)/client' >build/override.txt
	@printf 'pip>=25.3\nsetuptools\n' >build/build-tools.in
	@$(BIN)/python $(PIP_INSTALL) uv
	@{ echo '# Written by `make lock`: the versions that develop and test batchd. What users may install is in pyproject.toml.'; \
		echo '# PyTorch and what it brings along for GPUs are not here: each machine has those that fit it (TORCH in the Makefile).'; \
		$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-header --no-annotate --all-extras \
			$(GROUPS:%=--group %) --override build/override.txt --no-emit-package batchd-client pyproject.toml build/build-tools.in | \
			grep -vE '^(torch=|triton=|nvidia-|cuda-)'; } >build/$(LOCK)
	@mv build/$(LOCK) $(LOCK)

test-ends: $(STAMP) ## Run the unit tests and those of streams with the oldest and with the newest libraries that users may have
	@$(BIN)/python $(PIP_INSTALL) uv
	@mkdir -p build && echo 'batchd-client @ file://$(CURDIR)/client' >build/override.txt
	@for end in lowest-direct highest; do echo "libraries: $$end"; \
		$(BIN)/uv venv --quiet --clear --seed --python $(BIN)/python build/$$end-venv && \
		$(BIN)/uv pip install --quiet --python build/$$end-venv --resolution $$end --override build/override.txt \
			--group dev --editable ./client --editable '.[arrow,cloud,lmdb,sound,text,tfrecord,video]' && \
		build/$$end-venv/bin/python -m pytest -q -m 'not slow' -n $(LANES) --dist loadfile --ignore tests/unit/repository $(call chosen,$(ENDS)) || exit; done

format: setup ## Format the code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: setup ## Write what is made from the code: the JSON Schema, and pages of docs/ (configuration, commands, errors, log, metrics, protocol)
	$(BIN)/python docs/make_schema.py > batchd/config/schema.json
	$(BIN)/batchd config --reference > docs/configuration.md
	$(BIN)/python docs/make_protocol.py > docs/protocol.md
	$(BIN)/python docs/make_metrics.py > docs/metrics.md
	$(BIN)/python docs/make_commands.py > docs/commands.md
	$(BIN)/python docs/make_errors.py > docs/errors.md
	$(BIN)/python docs/make_logs.py > docs/logs.md

site: setup ## Build the documentation as a site: build/site/index.html
	@$(BIN)/python $(PIP_INSTALL) --group docs
	@rm -rf build/site build/site-source
	$(BIN)/python docs/site/stage.py build/site-source
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs/site build/site-source build/site
	@! grep -rnoE '(<(script|link|img|iframe)[^>]*(src|href)="|url\(["'"'"']?)(https?:)?//[^" )]*' build/site --include='*.html' --include='*.css' || { echo "the site asks other hosts for these"; exit 1; }
	@echo "the site: build/site/index.html"

bench: bytecode ## Run the benchmarks (DATA=/path/to/images, ONLY=name)
	@PYTHONPATH=benchmarks/peers $(BIN)/python benchmarks/run.py $(if $(DATA),--data '$(DATA)') $(if $(ONLY),--only '$(ONLY)')

bench-peers: bytecode ## Measure batchd beside its peers (DATA=/path/to/photographs, ONLY=names, ROUNDS=3)
	@test -n '$(DATA)' || { echo "bench-peers wants photographs: make bench-peers DATA=/path/to/photographs"; exit 1; }
	@$(BIN)/python $(PIP_INSTALL) --group peers
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/peers/run.py --data '$(DATA)' --rounds '$(ROUNDS)' --only '$(ONLY)'

bench-pool-peers: bytecode ## Measure worker hosts beside tf.data service, Ray Data and Ray's object store (DATA=, ONLY=workers, ROUNDS=3)
	@PYTHONPATH=benchmarks/peers $(BIN)/python benchmarks/pool_peers.py --rounds '$(ROUNDS)' --only '$(ONLY)' $(if $(DATA),--data '$(DATA)')

profile: bytecode ## Draw where the CPU time of a worker goes: docs/pictures/worker.svg (DATA=/path/to/photographs; perf, gcc, libjpeg.a)
	@test -n '$(DATA)' || { echo "profile wants photographs: make profile DATA=/path/to/photographs"; exit 1; }
	@$(BIN)/python $(PIP_INSTALL) --group peers
	@$(BIN)/python tools/profile_worker.py --data '$(DATA)'

wheels: setup ## Build the wheels of both distributions into dist/, with libjpeg-turbo where it is installed
	rm -rf dist build/wheel build/lib build/lib.* build/temp.*
	@$(BIN)/python $(PIP_INSTALL) --group wheels || echo "without the tools for wheels"
	$(BUILD) --quiet --wheel --outdir dist client
	$(BUILD) --quiet --wheel --outdir build/wheel .
	rm -rf client/build build/lib build/lib.* build/bdist.* build/temp.*
	@$(BIN)/python deploy/finish_wheel.py build/wheel dist
	@ls dist

dist: wheels ## Build all that is published into dist/, and an index of it; check it, and run it as uvx and pipx do (docs/release.md)
	@$(BIN)/python $(PIP_INSTALL) --group release
	$(BUILD) --quiet --sdist --outdir dist client
	$(BUILD) --quiet --sdist --outdir dist .
	rm -rf build/from-sdist build/pipx build/uv
	$(BIN)/twine check --strict dist/*.whl dist/*.tar.gz
	$(BIN)/python deploy/simple_index.py dist
	$(BIN)/check-wheel-contents --ignore W009,W010 dist/*.whl # the client is two packages; batchd.libs is auditwheel's
	$(BIN)/python -m pip wheel -qq --no-deps --wheel-dir build/from-sdist dist/*.tar.gz
	UV_TOOL_DIR=build/uv $(BIN)/uvx --isolated --refresh-package batchd --refresh-package batchd-client \
		--python $(BIN)/python --find-links dist --from batchd batchd --version
	PIPX_HOME=$(CURDIR)/build/pipx $(BIN)/pipx run --no-cache --pip-args '--find-links $(CURDIR)/dist' --spec batchd batchd --version

install: ## Install the server (PREFIX, SYSCONFDIR, DESTDIR; EXTRAS=arrow,cloud; WHEELS=dir without an index)
	@$(PLACES) deploy/install.sh install

uninstall: ## Remove what `make install` installed (PURGE=1: configuration, data and user too)
	@$(PLACES) PURGE='$(PURGE)' deploy/install.sh uninstall

wheelhouse: ## Collect in build/wheelhouse what `make install WHEELS=build/wheelhouse` needs besides this tree
	@$(PLACES) deploy/install.sh wheelhouse build/wheelhouse

deb: ## Build a Debian package in build/, for this machine's /usr/bin/python3 (DEB_PYTHON, EXTRAS, WHEELS)
	@PYTHON='$(DEB_PYTHON)' WHEELS='$(WHEELS)' EXTRAS='$(EXTRAS)' deploy/debian/build.sh build

manifests: setup ## Render deploy/kubernetes from the Helm chart, by Helm's own engine
	@$(BIN)/python $(PIP_INSTALL) --group packages
	$(BIN)/python deploy/helm/render.py deploy/kubernetes

test-packages: setup ## Install, package and boot it in roots of their own (as root; what is not available is skipped)
	@$(BIN)/python $(PIP_INSTALL) --group packages
	$(BIN)/python -m pytest $(call chosen,tests/packages)

test-image: setup ## Build deploy/Dockerfile and run it (as root; apt-get install podman runc debootstrap; some ten minutes)
	$(BIN)/python -m pytest $(call chosen,tests/image)

clean: ## Remove everything that the other targets made
	rm -rf $(VENV) build client/build dist demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -f batchd/data/pipeline/*.so batchd/data/storage/*.so
