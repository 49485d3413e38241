"""Other tools' names for keys of a configuration. Daemon and CLI; standard library only.

    num_workers    in [streams.photos]   did you mean workers in [daemon]?
    p              in random_flip        did you mean probability?
    ToTensor       as an op              did you mean op = "to"?
    shuffle_buffer                       not needed: ...

A word is compared without capitals, "_" and "-". Words are those of torch and torchvision, tf.data
and Keras, DALI, albumentations, WebDataset, Ultralytics, timm and the Hugging Face libraries.

Invariant: a key is suggested only where the table has it, or with the table that has it. So ``op``
and ``type``, which decide what a table may have, are never suggested for another key.
"""

from collections.abc import Mapping, Sequence

from batchd.runtime.suggestions import probably_meant

KEYS: Mapping[str, str] = {
    "bucket": "group_by_length bucket_by_length bucket_by_sequence_length length_bucketing aspect_ratio_bucketing "
    "max_tokens_per_batch tokens_per_batch token_budget",
    "aspect": "ratio aspect_ratio",
    "area": "scale",
    "batch_size": "bs batch batchsize per_device_train_batch_size per_gpu_batch_size max_batch_size samples_per_gpu",
    "brightness": "brightness_limit",
    "cache": "caching cache_images use_cache",
    "classes": "num_classes n_classes nclasses depth class_count",
    "color": "color_mode color_space colorspace image_type output_type imread_flag",
    "contrast": "contrast_limit",
    "deviation": "mstd magnitude_std",
    "magnitude": "m magnitude_level",
    "operation_probability": "prob_per_op",
    "degrees": "angle angles angle_range rotation rotate_limit",
    "delimiter": "sep separator field_delim",
    "quoting": "quote quotechar quote_char quotes use_quote_delim",
    "direction": "axis axes flip_mode horizontal vertical",
    "drop_last": "drop_remainder drop_last_batch drop_incomplete last_batch_policy",
    "dtype": "output_dtype out_dtype datatype data_type",
    "epoch_samples": "epoch_size epoch_length steps_per_epoch with_epoch",
    "field": "column col key image_key feature",
    "fields": "columns features schema image_columns usecols output_signature feature_description",
    "erase": "random_erasing random_erase reprob re_prob",
    "factor": "sharpness_factor sharpness alpha",
    "fill": "fill_value fillvalue cval value border_value constant_values pad_value padding_value remode",
    "function": "fn func callable map_fn map_func target",
    "hue": "hue_shift hue_shift_limit",
    "distortion": "distortion_scale",
    "holes": "num_holes max_holes num_holes_range n_holes",
    "interpolation": "interp interp_type interpolation_mode resample filter method",
    "label": "label_key label_column target_key",
    "length": "num_bytes",
    "longer_side": "longest_edge longer_edge longest_max_size max_size long_side",
    "max_longer_side": "max_size longest_edge",
    "shorter_sides": "scales min_sizes short_sides",
    "sizes": "multi_scale multiscale random_size",
    "multiple_of": "bucket_reso_steps reso_steps resolution_step size_divisor divisible_by stride pad_to_multiple_of",
    "mix": "mixup cutmix mixup_alpha cutmix_alpha mixup_fn",
    "max_length": "maxlen max_len max_seq_length sequence_length model_max_length",
    "memory": "shm shm_size shared_memory buffer_bytes cache_limit",
    "on_error": "handler errors ignore_errors error_policy skip_errors",
    "order": "data_format output_layout layout format channels_first channels_last memory_format",
    "path": "annotations annotation_file annotation_path ann_file annfile "
    "dir directory folder data_dir data_path dataset_dir file file_root filename image_dir root root_dir data url",
    "patterns": "pattern glob globs file_pattern path_glob",
    "pipeline": "transforms transform augmentation augmentations augment preprocessing preprocess operations ops steps map maps",
    "probability": "p prob proba chance",
    "ratio": "aspect_ratio aspect_ratios random_aspect_ratio",
    "repeats": "repeated_aug aug_repeats num_repeats repeated_augmentation repeat_augmentation batch_augmentation",
    "root": "dir directory folder data_dir path root_dir base_dir",
    "saturation": "saturation_limit sat_shift_limit",
    "scale": "area random_area crop_fraction rescale scale_limit",
    "seed": "random_seed manual_seed rng_seed random_state generator",
    "shards": "urls url files filenames file_names tar_files tars pattern patterns path paths",
    "shorter_side": "shortest_edge shorter_edge smallest_max_size resize_shorter short_side resize_size",
    "shuffle": "random_shuffle shuffle_files shuffled initial_fill shuffle_data",
    "snr_db": "snr snr_range min_snr_in_db max_snr_in_db min_snr_db max_snr_db",
    "sigma": "sigma_limit blur_limit radius kernel_size",
    "size": (
        "img_size image_size imgsz imgs input_size target_size crop_size output_size out_size output_shape resolution shape "
        "height width resize_x resize_y pad_to_size"
    ),
    "source": "dataset data input reader train_dataset",
    "sources": "datasets parts children",
    "std": "stddev sigma variance std_dev",
    "tcp": "address host port listen bind endpoint",
    "weights": "probs probabilities sampling_probabilities sample_weights",
    "window": "prefetch prefetch_factor prefetch_batches prefetch_queue_depth prefetch_buffer_size queue_size max_prefetch",
    "workers": "num_workers nworkers n_workers worker_count num_threads num_parallel_calls num_cpus num_proc threads processes",
    "sample_timeout_s": "timeout timeout_s worker_timeout",
}
"""By batchd's key, the words of others."""
KINDS: Mapping[str, str] = {
    "affine": "random_affine shift_scale_rotate shear translate random_shear random_translate warp_affine",
    "augmix": "aug_mix augment_and_mix",
    "auto_augment": "autoaugment auto_augment_policy",
    "autocontrast": "auto_contrast random_autocontrast random_auto_contrast",
    "blur": "gaussian_blur random_gaussian_blur",
    "call": "lambda map py_function python_function numpy_function apply function python_operator",
    "choose": "random_choice one_of oneof some_of random_order",
    "cast": "convert_dtype as_type astype to_dtype convert_image_dtype",
    "center_crop": "crop central_crop resize_with_crop_or_pad",
    "color_jitter": "jitter random_brightness_contrast brightness_contrast hue_saturation_value hsv random_brightness",
    "crop_to_bucket": "bucket aspect_bucket aspect_ratio_bucket aspect_ratio_bucketing arb enable_bucket",
    "csv": "csv_dataset dataframe pandas table tsv",
    "cutout": "coarse_dropout grid_dropout",
    "decode": (
        "decode_image decode_jpeg decode_png image_decoder decoders_image imdecode imread read_image load_image pil "
        "to_pil_image"
    ),
    "drop": "remove_columns select_columns delete pop",
    "elastic": "elastic_transform elastic_deformation random_elastic",
    "equalize": "random_equalize histogram_equalization",
    "erase": "random_erasing random_erase erasing",
    "folder": (
        "image_folder image_folder_dataset dataset_folder image_dataset_from_directory flow_from_directory directory dir "
        "file_reader readers_file images local"
    ),
    "generator": "iterable iterable_dataset from_generator external_source iterator",
    "gray": "grayscale random_grayscale to_gray rgb_to_grayscale rgb2gray grey greyscale",
    "invert": "random_invert invert_img",
    "jsonl": "json json_lines jsonlines ndjson json_dataset",
    "layout": "permute transpose channels_first chw hwc nchw nhwc to_chw",
    "letterbox": "letter_box resize_and_pad resize_with_crop_and_pad",
    "list": "file_list files filelist image_list",
    "mix": "interleave sample_from_datasets interleave_datasets random_mix weighted",
    "concat": "concat_dataset concatenate concatenate_datasets chain",
    "normalize": "normalise crop_mirror_normalize standardize normalization rescale",
    "npy": "numpy numpy_array array readers_numpy memmap",
    "pad": "pad_if_needed resize_with_pad",
    "perspective": "random_perspective warp_perspective",
    "pad_batch": "collate pad_collate padded_batch pad_sequence",
    "parquet": "arrow pyarrow huggingface hf datasets",
    "patches": "patchify patch_embed native_resolution navit",
    "posterize": "random_posterize",
    "push": "queue stream live",
    "python": "dataset map_dataset map_style custom torch_dataset",
    "rand_augment": "randaugment rand_aug randaug aa",
    "random_crop": "random_sized_crop",
    "random_flip": (
        "horizontal_flip random_horizontal_flip hflip fliplr flip_left_right random_flip_left_right vertical_flip vflip flip "
        "random_vertical_flip flipud mirror"
    ),
    "random_resized_crop": "inception_crop random_sized_bbox_crop random_resize_crop",
    "resize": "scale_image rescale_image longest_max_size smallest_max_size shortest_edge resizing",
    "rotate": "random_rotation rotation random_rotate random_rotate90 safe_rotate",
    "sharpen": "sharpness adjust_sharpness random_adjust_sharpness random_sharpness",
    "solarize": "random_solarize random_solarization",
    "subset": "take skip slice split random_split shard",
    "trivial_augment": "trivialaugment trivial_augment_wide ta_wide",
    "lerobot": "lerobot_dataset le_robot_dataset streaming_lerobot_dataset",
    "tokens": "bin indexed_dataset megatron nanogpt gpt_dataset token_files",
    "tfrecord": "tf_record tf_record_dataset tfrecords readers_tfrecord tfds",
    "to": "to_tensor to_tensor_v2 pil_to_tensor to_image to_float tensor totensor",
    "tokenize": "tokenizer text_vectorization auto_tokenizer bpe",
    "lowercase": "lower to_lower",
    "video": "readers_video video_reader video_dataset mp4",
    "views": "multi_crop multicrop two_crops two_crops_transform contrastive_views data_augmentation_dino",
    "webdataset": "wds tar tars readers_webdataset web_dataset tar_shards",
}
"""By batchd's step or source, the words of others."""
_NOT_HERE: Mapping[str, str] = {
    'not needed: shuffle = true mixes the whole source, and shuffle = { blocks = 64, block_bytes = "8MiB" } blocks of it': (
        "shuffle_buffer shuffle_buffer_size buffer_size reshuffle_each_iteration shardshuffle"
    ),
    "not needed: BatchdLoader copies from shared memory to the GPU": "pin_memory pin_memory_device",
    "not needed: the daemon's workers stay": "persistent_workers worker_init_fn multiprocessing_context",
    'samples of different shapes: the step "pad_batch" or "ragged" at the end of the pipeline': "collate_fn batch_collate",
    'set shuffle and seed; a source of the type "subset" selects samples': "sampler batch_sampler",
    "the trainer decides it: daemon.stream(name, epochs=3)": "epochs num_epochs repeat",
    "the trainer decides it: daemon.stream(name, rank, world_size)": (
        "rank world_size num_replicas num_shards shard_id shard_index local_rank"
    ),
    'the trainer decides it: BatchdLoader(name, device="cuda")': "device device_id",
}
"""By what helps, the words of others for what no key sets."""


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "").replace(".", "")


def _by_word(words: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, others in words.items():
        for word in others.split():
            found.setdefault(_plain(word), []).append(name)
    return found


def kind_meant(word: str, known: Sequence[str]) -> str | None:
    """The kind of a step or source, out of ``known``, that another tool calls so."""
    return next((name for name in _by_word(KINDS).get(_plain(word), ()) if name in known), None)


def key_misspelt(word: str, known: Sequence[str]) -> str | None:
    """The key of the ``known`` ones that a wrong one stands for, as another tool's or a slip."""
    return next((name for name in _by_word(KEYS).get(_plain(word), ()) if name in known), probably_meant(word, known))


def key_meant(word: str, known: Sequence[str], elsewhere: Mapping[str, Sequence[str]]) -> str:
    """Help with a key that another tool has; "" if none is known to have it.

    ``known``: the keys of this table. ``elsewhere``: keys of other tables, by their names, and of
    steps under "pipeline".
    """
    meant = _by_word(KEYS).get(_plain(word), [])
    for name in meant:
        if name in known:
            return f"did you mean {name}?"
    for name in meant:
        for table, keys in elsewhere.items():
            if name in keys:
                return f"did you mean {name} in {table}?"
    advice = _by_word(_NOT_HERE).get(_plain(word))
    if advice:
        return advice[0]
    return ""
