"""Workers on other machines.

    worker processes --rows, TCP + CURVE--> gateway: checks, copies once --> slot
                     <--------- orders ---- gateway <--SEQPACKET-- daemon

gateway           the process on the daemon's host through which the rows come
worker_host       `batchd worker`: the program on another machine
ray               worker hosts on a Ray cluster
remote            remote workers, as the daemon has them; gateway_child: the gateways' processes
wanted            how many remote workers the trainers need
gateway_messages  between daemon and gateway; messages: between gateway and worker host
together          several messages in one
"""
