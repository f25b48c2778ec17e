//! Features that are not built yet and that several keys or choices request.

pub(crate) const ADAPTERS_BY_OTHER_KEYS: &str = "further ways to name adapters";
pub(crate) const ANSWERS_BY_LISTS: &str = "lists of answers by correctness";
pub(crate) const AUDIO_MODELS: &str = "audio models";
pub(crate) const BATCHES_OF_PROMPTS: &str = "sizes in batches of prompts";
pub(crate) const BLOCKS_UNLIKE_THEIR_FAMILYS: &str = "changes to a family's blocks";
pub(crate) const BLOCK_DIFFUSION: &str = "generation by block diffusion";
pub(crate) const CLOUD_STORAGE: &str = "cloud storage";
pub(crate) const CONVERSATIONS: &str = "conversations as training data";
pub(crate) const CONVERSION_OF_CHECKPOINTS: &str = "conversion of checkpoints";
pub(crate) const CUSTOM_DEVICE_ORDERS: &str = "custom device orders";
pub(crate) const DEBUGGING_OF_ROLLOUTS: &str = "debugging output of reinforcement learning";
pub(crate) const DILOCO: &str = "DiLoCo";
pub(crate) const DUMPS_OF_TRACED_PROGRAMS: &str = "dumps of traced programs";
pub(crate) const ELASTIC_TRAINING: &str = "elastic training";
pub(crate) const EXCHANGE_OF_HEADS: &str = "attention that exchanges heads between devices";
pub(crate) const EXPERT_PARALLELISM: &str = "further options of expert parallelism";
pub(crate) const LIMITS_OF_ROLLOUTS: &str = "limits of the engine for rollouts";
pub(crate) const MASKED_ANSWERS: &str = "block diffusion of answers only";
pub(crate) const MEMORY_ESTIMATES: &str = "memory estimates";
pub(crate) const MULTIMODAL_MODELS: &str = "multimodal models";
pub(crate) const PAGED_ATTENTION: &str = "paged attention outside of serving";
pub(crate) const PIPELINE_PARALLELISM: &str = "pipeline parallelism";
pub(crate) const PROCESSES: &str = "several processes";
pub(crate) const PROFILES_BY_NSYS: &str = "profiles by Nsight Systems";
pub(crate) const PROFILES_OVER_A_PORT: &str = "profiles over a network port";
pub(crate) const PROFILE_OPTIONS_OF_TPUS: &str = "options of TPU profiles";
pub(crate) const QUANTIZATION: &str = "quantization";
pub(crate) const QUANTIZED_CACHE: &str = "a quantized cache";
pub(crate) const QUANTIZED_CHECKPOINTS: &str = "quantized checkpoints";
pub(crate) const QUANTIZED_DRAWN_BASES: &str = "a quantized base of random weights";
pub(crate) const RING_ATTENTION: &str = "ring attention";
pub(crate) const ROLLOUTS_BESIDE_TRAINING: &str = "rollouts beside training";
pub(crate) const ROLLOUTS_ON_OTHER_DEVICES: &str = "rollouts on other devices than training";
pub(crate) const SAVED_PREFILL_CACHES: &str = "saved prefill caches";
pub(crate) const SEQUENCE_MEAN: &str = "the aggregation `sequence-mean`, which Tunix does not define";
pub(crate) const SERVING_ON_SEPARATE_SLICES: &str = "serving on separate slices";
pub(crate) const SEVERAL_COLUMNS: &str = "documents from several columns";
pub(crate) const SPARSE_WEIGHTS: &str = "sparse weights";
pub(crate) const STACKS_IN_THE_CLOUD: &str = "stack traces in a cloud service";
pub(crate) const STRIPED_SEQUENCES: &str = "striped sequences";
pub(crate) const TEMPLATES_OF_PROMPTS: &str = "templates of prompts in JSON files";
pub(crate) const WANDB: &str = "Weights & Biases";

/// Alternatives to some of the features.
const INSTEAD: &[(&str, &str)] = &[
    (ADAPTERS_BY_OTHER_KEYS, "name the adapters with `lora.enable_lora=true lora.lora_restore_path=…`"),
    (BLOCK_DIFFUSION, "compute the logits of given tokens, masked ones among them, with `maxtext logits`"),
    (
        BATCHES_OF_PROMPTS,
        "use `steps` for the number of batches, `eval_steps` for those of evaluations, and `gradient_accumulation_steps` for micro-batches",
    ),
    (
        CLOUD_STORAGE,
        "use `gs://`, `s3://` or `az://`, or a path of this machine, to which another service may be mounted",
    ),
    (
        PAGED_ATTENTION,
        "use `attention=autoselected`, `attention=dot_product` or `attention=flash`; the cache of `maxtext serve` has \
         pages with each of them",
    ),
    (
        PROFILES_BY_NSYS,
        "leave the key out and run `nsys profile maxtext train …`, which profiles the whole run; or use `profiler=xplane`",
    ),
    (
        SERVING_ON_SEPARATE_SLICES,
        "leave the key out: `maxtext serve` prefills and generates on the same device, a piece of a prompt at a time",
    ),
    (SEVERAL_COLUMNS, "name the column that holds the text, such as `train_data_columns=text`"),
];

/// The hint for a missing feature, if more can be done than leaving out the keys that request it.
pub(crate) fn instead(feature: &str) -> Option<&'static str> {
    INSTEAD.iter().find(|(known, _)| *known == feature).map(|(_, instead)| *instead)
}
