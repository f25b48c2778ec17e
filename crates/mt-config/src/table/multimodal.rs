//! Images, video and audio.

use super::{KeyGroup, features};
use crate::key::Key;

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "MultimodalGeneral",
        title: "Images, video and audio",
        prefix: None,
        keys: &[
            Key::boolean("use_multimodal", false, "Accept images, video or audio along with text.")
                .refused(features::MULTIMODAL_MODELS)
                .acts_on("model"),
            Key::boolean("freeze_vision_encoder_params", true, "Freeze the weights of the vision encoder.")
                .refused(features::MULTIMODAL_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("vision"),
            Key::boolean("freeze_audio_encoder_params", true, "Freeze the weights of the audio encoder.")
                .refused(features::AUDIO_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("audio"),
            Key::boolean("use_audio", false, "Add an audio encoder to the model.")
                .refused(features::AUDIO_MODELS)
                .acts_on("audio"),
            Key::integer_or_integers(
                "image_size_for_vit",
                896,
                "Side length of the vision encoder's input images in pixels, or a list of height and width.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::text("image_path", "", "Image files that go with the prompt, separated by commas.")
                .refused(features::MULTIMODAL_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("decoding")
                .may_change(),
            Key::text(
                "image_placeholder",
                "<|image|>",
                "Placeholder text in a prompt that an image replaces.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("tokenizer"),
            Key::text(
                "posemb_type_for_vit",
                "learn",
                "How the vision encoder represents positions; `learn` for a table that is \
                 trained.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer(
                "max_num_images_per_example",
                -1,
                "Maximum number of images in one training example; -1 for no limit.",
            )
            .at_least(-1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("data"),
            Key::text("video_path", "", "Video files that go with the prompt, separated by commas.")
                .refused(features::MULTIMODAL_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("decoding")
                .may_change(),
            Key::text("audio_path", "", "Audio files that go with the prompt, separated by commas.")
                .refused(features::AUDIO_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("decoding")
                .may_change(),
            Key::text(
                "video_placeholder",
                "<|video|>",
                "Placeholder text in a prompt that a video replaces.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("tokenizer"),
            Key::text("audio_placeholder", "<|audio|>", "Placeholder text in a prompt that audio replaces.")
                .refused(features::AUDIO_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("tokenizer"),
            Key::boolean(
                "use_audio_in_video",
                false,
                "Read the sound track of a video as well as its frames.",
            )
            .refused(features::AUDIO_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("data"),
            Key::boolean(
                "use_mrope",
                false,
                "Rotate queries and keys by three positions: time, row and column.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("rotary embedding"),
            Key::integers(
                "mrope_section",
                &[24, 20, 20],
                "Number of rotary frequencies that follow time, rows and columns when \
                 `use_mrope` is on.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("rotary embedding"),
            Key::integer(
                "position_id_per_seconds",
                25,
                "Positions in time that one second of video or audio takes.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("rotary embedding"),
            Key::text(
                "attention_for_vit",
                "dot_product",
                "The vision encoder's attention implementation; the values are those of `attention`.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision")
            .may_change(),
            Key::choice(
                "vision_encoder_block",
                "none",
                &["none", "gemma3", "llama4", "qwen3_omni", "gemma4", "qwen3_5", "qwen3_vl"],
                "Family whose vision encoder the model has; `none` for no vision encoder.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::optional_integer(
                "video_max_grid_t",
                "Maximum number of patches of a video along time; the model's limit if none.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::optional_integer(
                "video_max_grid_h",
                "Maximum number of patches of a video frame from top to bottom; the model's limit if none.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::optional_integer(
                "video_max_grid_w",
                "Maximum number of patches of a video frame from left to right; the model's limit if none.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
        ],
    },
    KeyGroup {
        name: "VisionTower",
        title: "Vision encoder",
        prefix: None,
        keys: &[
            Key::integer("hidden_size_for_vit", 1408, "Width of the vision encoder's layers.")
                .at_least(1.0)
                .refused(features::MULTIMODAL_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("vision"),
            Key::integer(
                "intermediate_size_for_vit",
                5632,
                "Width of the vision encoder's feed-forward layers.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer(
                "num_attention_heads_for_vit",
                16,
                "Attention heads in each layer of the vision encoder.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer(
                "num_channels_for_vit",
                3,
                "Color channels of the images that the vision encoder takes.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer(
                "tile_size_for_vit",
                336,
                "Side of the tiles that large images are cut into, in pixels.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer(
                "patch_size_for_vit",
                14,
                "Side of the square patch that becomes one visual token, in pixels.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer(
                "conv_stride_for_vit",
                14,
                "Pixels between the starts of two neighboring patches of an image.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer("num_hidden_layers_for_vit", 34, "Number of layers of the vision encoder.")
                .at_least(1.0)
                .refused(features::MULTIMODAL_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("vision"),
            Key::integer(
                "rope_theta_for_vit",
                10000,
                "Longest rotary wavelength in the vision encoder, over 2π (theta).",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer("vision_output_dim_for_vit", 4096, "Width of the vision encoder's output.")
                .at_least(1.0)
                .refused(features::MULTIMODAL_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("vision"),
            Key::integer(
                "spatial_merge_size_for_vit",
                2,
                "Side of the square of neighboring patches that are merged into one visual \
                 token.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer(
                "out_hidden_size_for_vit",
                512,
                "Width of a visual token after neighboring patches are merged.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer("temporal_patch_size_for_vit", 2, "Number of video frames that share one patch.")
                .at_least(1.0)
                .refused(features::MULTIMODAL_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("vision"),
            Key::integer(
                "num_position_embeddings_for_vit",
                1024,
                "Entries in the vision encoder's table of learned positions.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integers(
                "deepstack_visual_indexes_for_vit",
                &[],
                "Layers of the vision encoder, from 0, whose features are added to the first \
                 decoder layers.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer(
                "vision_output_length",
                -1,
                "Visual tokens of one image; -1 derives them from the sizes of image and patch.",
            )
            .at_least(-1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
        ],
    },
    KeyGroup {
        name: "VisionProjector",
        title: "Vision projector",
        prefix: None,
        keys: &[
            Key::integer(
                "projector_input_dim_for_vit",
                4096,
                "Width of the features that enter the projector between vision encoder and \
                 decoder.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer("projector_output_dim_for_vit", 4096, "Width of the vision projector's output.")
                .at_least(1.0)
                .refused(features::MULTIMODAL_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("vision"),
            Key::float(
                "pixel_shuffle_ratio_for_vit",
                0.5,
                "Shrink each side of the patch grid to this share; 0.5 turns four patches into \
                 one.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::float(
                "projector_dropout_for_vit",
                0.0,
                "Share of activations that are dropped in the vision projector.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::text(
                "vision_projector_type",
                "default",
                "Projector between vision encoder and decoder: that of the model's family \
                 (`default`) or a custom one.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer(
                "vision_connector_num_layers",
                2,
                "Number of layers of a custom projector between vision encoder and decoder.",
            )
            .at_least(1.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::integer(
                "vision_connector_hidden_size",
                0,
                "Width of the hidden layers of a custom vision projector; 0 for the decoder's \
                 width.",
            )
            .at_least(0.0)
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::text(
                "vision_connector_activation",
                "gelu",
                "Activation function between the layers of a custom vision projector.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
            Key::boolean(
                "vision_connector_use_bias",
                true,
                "Add biases in the layers of a custom vision projector.",
            )
            .refused(features::MULTIMODAL_MODELS)
            .only_with("use_multimodal", &[])
            .acts_on("vision"),
        ],
    },
    KeyGroup {
        name: "AudioEncoder",
        title: "Audio encoder",
        prefix: None,
        keys: &[
            Key::integer("d_model_for_audio", 256, "Width of the audio encoder's layers.")
                .at_least(1.0)
                .refused(features::AUDIO_MODELS)
                .only_with("use_audio", &[])
                .acts_on("audio"),
            Key::integer(
                "encoder_attention_heads_for_audio",
                4,
                "Attention heads in each layer of the audio encoder.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::integer(
                "encoder_ffn_dim_for_audio",
                512,
                "Width of the audio encoder's feed-forward layers.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::integer("encoder_layers_for_audio", 2, "Number of layers of the audio encoder.")
                .at_least(1.0)
                .refused(features::AUDIO_MODELS)
                .only_with("use_audio", &[])
                .acts_on("audio"),
            Key::float(
                "attention_dropout_for_audio",
                0.0,
                "Share of attention weights that are dropped in the audio encoder.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::float(
                "activation_dropout_for_audio",
                0.0,
                "Share of activations that are dropped in the audio encoder's feed-forward \
                 layers.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::text(
                "activation_function_for_audio",
                "gelu",
                "Activation function of the audio encoder's feed-forward layers.",
            )
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::integer(
                "num_mel_bins_for_audio",
                128,
                "Frequency bands of the mel spectrogram that the audio encoder takes.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::integer(
                "max_source_positions_for_audio",
                1500,
                "Maximum number of positions of the audio encoder, in frames after its convolutions.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::boolean(
                "scale_embedding_for_audio",
                true,
                "Multiply the audio encoder's embeddings by the square root of their width.",
            )
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::integer(
                "n_window_for_audio",
                50,
                "Half the length of the audio chunks that are convolved, in spectrogram frames.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::integer(
                "n_window_infer_for_audio",
                800,
                "Spectrogram frames within which positions of the audio encoder attend to each \
                 other.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::integer(
                "conv_chunksize_for_audio",
                500,
                "Number of audio chunks that are convolved at once, to bound memory.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio")
            .may_change(),
            Key::integer(
                "downsample_hidden_size_for_audio",
                256,
                "Channels of the convolutions that shorten audio before its encoder.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::integer("output_dim_for_audio", 512, "Width of the audio encoder's output.")
                .at_least(1.0)
                .refused(features::AUDIO_MODELS)
                .only_with("use_audio", &[])
                .acts_on("audio"),
            Key::integer(
                "num_conv_layers_for_audio",
                3,
                "Number of convolutions that shorten audio before its encoder.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::float(
                "max_timescale_for_audio",
                10000.0,
                "Longest wavelength of the audio encoder's sinusoidal positions, over 2π.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
            Key::integer(
                "max_sample_len_for_audio",
                10000,
                "Longest audio input that the encoder takes, in samples.",
            )
            .at_least(1.0)
            .refused(features::AUDIO_MODELS)
            .only_with("use_audio", &[])
            .acts_on("audio"),
        ],
    },
];
