"""The source ``coco``: images, and the objects in them, as COCO's JSON names them."""
