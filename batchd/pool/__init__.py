"""Workers on other machines.

The way of some rows, out and back; each arrow has its message:

    core     daemon     gateway     worker host     worker
      |         |          |             |            |
      |-------->|   OrderChunk: an action             |
      |         |--------->|   FillRows, and the slot |
      |         |          |------------>|   FillRows |
      |         |          |             |----------->|   Chunk: rows for scratch memory
      |         |          |             |<-----------|   ChunksFilled; ChunkDone in this process
      |         |          |<============|   OrderFilled + the rows: checked, copied once
      |<-------------------|   OrderFilled, an event  |

Every other fact of a worker host keeps one name from there to the core, too (``core.events``): it
is a message that the core takes as an event.

gateway        the process on the daemon's host through which the rows come
worker_host    `batchd worker`: the program on another machine
ray            worker hosts on a Ray cluster
remote         remote workers, as the daemon has them; gateway_child: the gateways' processes
wanted         how many remote workers the trainers need
messages       between worker host, gateway and daemon, also several in one
"""
