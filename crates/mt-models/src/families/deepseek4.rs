//! DeepSeek-V4: compressed attention, experts chosen by token in the first layers, and hyper-connections.

use mt_config::{AttentionType, CompressedGroup, DecoderBlock, ModelGroup, RopeType};
use mt_nn::{
    RotaryExtent, RotaryOptions, RotaryScaling,
    attention::{BlockIndexerOptions, BlockOptions, CompressedOptions},
    experts::{GatedUnit, RouterBias, Scores},
};
use serde_json::{Map, Value, json};

use super::{
    Along, Family, FusedOrder, HuggingFaceFamily, MaxTextLayers, ModelType, describe,
    names::{self, TensorName, each_expert, matrix, table, vector},
};
use crate::{
    ModelError,
    decoder::{
        CompressedAttentionConfig, DecoderConfig, ExpertsConfig, LayerConfig, LayerNames, LayerRun, StreamEnd,
    },
    hugging_face::{
        Described, Field, HuggingFaceConfig, Settings,
        fields::{self, COMMON, Kind, Otherwise},
        rope,
    },
};

pub(super) static DEEPSEEK4: Family = Family {
    blocks: &[DecoderBlock::DeepSeek4],
    describe,
    maxtext_names: &[
        ("pre_attention_norm", "pre_self_attention_layer_norm"),
        ("compressed_attention", "self_attention"),
        ("pre_mlp_norm", "post_self_attention_layer_norm"),
        ("experts.shared", "mlp.shared_experts"),
        ("experts", "mlp.MoeBlock_0"),
    ],
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: false,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &[ModelType {
            other_names,
            module_name: Some(|module, name| format!("mtp.{module}.{}", released(name))),
            ..ModelType::new("deepseek_v4", "DeepseekV4ForCausalLM")
        }],
        fields: &[COMMON, OWN_FIELDS, fields::EXPERTS_IN_TRAINING],
        always: &[("routed_bias", true), ("float32_gate_logits", true), ("norm_topk_prob", true)],
        tensors: &[MODEL, ATTENTION, EXPERTS, CONNECTIONS, PREDICTIONS],
        ignores: |config, name| {
            // Models may leave out modules that predict further tokens.
            module_of(name).is_some_and(|module| module >= config.predictions.len())
                || names::ignores(config, name)
        },
    }),
};

/// The module that predicts further tokens whose tensor has this name.
fn module_of(name: &str) -> Option<usize> {
    let inside = name.strip_prefix("mtp.").or_else(|| Some(name.split_once(".mtp.")?.1))?;
    inside.split('.').next()?.parse().ok()
}

fn describe(group: &ModelGroup) -> Result<DecoderConfig, ModelError> {
    let mut config = describe::decoder(group)?;
    let experts = experts(group)?;
    for (index, (layer, ratio)) in config.layers.iter_mut().zip(&group.compressed.compress_ratios).enumerate()
    {
        layer.mixer = Some(attention(group, *ratio).into());
        let hashed = index < group.experts.first_num_hash_layers;
        let own = ExpertsConfig {
            by_token: hashed.then_some(config.vocab),
            router_bias: experts.router_bias && !hashed,
            ..experts.clone()
        };
        layer.feed_forward = Some(own.into());
    }
    config.runs = runs(&config.layers, group.experts.first_num_hash_layers);
    // Modules that predict further tokens see a window, as in the published models, and choose experts by scores.
    let last = config.layers.last().cloned();
    let module = last.map(|layer| LayerConfig {
        mixer: Some(attention(group, 0).into()),
        feed_forward: Some(experts.into()),
        ..layer
    });
    config.predictions = module.into_iter().cycle().take(group.mtp_num_layers).collect();
    config.residual = describe::residual(group, StreamEnd::Weighted);
    Ok(config)
}

/// The first layers, which are never scanned, and the others, which repeat after two.
fn runs(layers: &[LayerConfig], num_hashed: usize) -> Vec<LayerRun> {
    let repeats =
        |first: usize| layers[first..].iter().zip(layers[first..].iter().skip(2)).all(|(a, b)| a == b);
    let first = (num_hashed.min(layers.len())..layers.len()).find(|first| repeats(*first));
    let others = first.unwrap_or(layers.len());
    let run = |name: &'static str, first, cycle, cycles: &'static str| LayerRun {
        name: name.into(),
        first,
        cycle,
        stored: LayerNames { cycles: cycles.into(), ..LayerNames::LAYERS },
    };
    // A cycle that is longer than its run is not scanned.
    let unscanned = run("first", 0, others + 1, "layers");
    let scanned = run("", others, 2, "scanned_blocks");
    match others {
        0 => vec![scanned],
        all if all == layers.len() => vec![unscanned],
        _ => vec![unscanned, scanned],
    }
}

fn attention(group: &ModelGroup, ratio: usize) -> CompressedAttentionConfig {
    let (keys, positions) = (&group.compressed, &group.positions);
    let (theta, scaling) = match ratio {
        0 => (positions.rope_max_timescale, RotaryScaling::None),
        _ => (keys.compressed_rope_max_timescale as f64, scaling(group)),
    };
    let mut attention = describe::attention(group).options;
    attention.scale = (group.head_dim as f64).powf(-0.5);
    CompressedAttentionConfig {
        heads: group.num_query_heads(),
        head_dim: group.head_dim,
        query_latent: group.latent.q_lora_rank,
        output_latent: keys.o_lora_rank,
        options: CompressedOptions {
            attention,
            window: group.layers.sliding_window_size,
            rotary: RotaryOptions {
                head_dim: group.latent.qk_rope_head_dim,
                min_timescale: positions.rope_min_timescale,
                max_timescale: theta,
                extent: RotaryExtent::Full,
                scaling,
            },
            groups: keys.o_groups,
            blocks: (ratio > 0).then(|| BlockOptions {
                size: ratio,
                indexer: CompressedGroup::is_indexed(ratio).then_some(BlockIndexerOptions {
                    heads: keys.indexer_n_heads,
                    head_dim: keys.indexer_head_dim,
                    num_chosen: keys.indexer_topk,
                }),
            }),
        },
    }
}

/// The scaling of layers with pooled keys. Cosines and sines are not scaled.
fn scaling(group: &ModelGroup) -> RotaryScaling {
    match describe::scaling(group) {
        RotaryScaling::Yarn { factor, beta_fast, beta_slow, original_length, truncate, .. } => {
            let attention_factor = Some(group.positions.rope_attention_factor.unwrap_or(1.0));
            RotaryScaling::Yarn { factor, beta_fast, beta_slow, original_length, truncate, attention_factor }
        }
        other => other,
    }
}

fn experts(group: &ModelGroup) -> Result<ExpertsConfig, ModelError> {
    let mut experts = describe::experts(group, Scores::SqrtSoftplus)?;
    let router = &mut experts.routed.router;
    router.bias = RouterBias::OfChoice;
    // Such scores are weights only relative to each other.
    router.normalized = true;
    experts.router_bias = group.experts.routed_bias;
    experts.shared = describe::shared_experts(group)?;
    let limit = Some(group.layers.mlp_activations_limit).filter(|limit| *limit > 0.0);
    if let (Some(limit), GatedUnit::Product(activations)) = (limit, experts.routed.unit) {
        experts.routed.unit = GatedUnit::Clamped { activations, limit };
    }
    if let Some(shared) = &mut experts.shared {
        shared.limit = limit;
    }
    Ok(experts)
}

const WINDOW: &str = "sliding_attention";
const SPARSE: &str = "compressed_sparse_attention";
const HEAVY: &str = "heavily_compressed_attention";
const BY_TOKEN: &str = "hash_moe";
const BY_SCORE: &str = "moe";

const OWN_FIELDS: &[Field] = &[
    Field::with(
        &["attention_bias"],
        |config, settings| {
            settings.set("attention_type", AttentionType::Compressed.name());
            settings.set("routed_score_func", "sqrtsoftplus");
            settings.set("mtp_own_norm", true);
            match config.boolean("attention_bias")? {
                Some(true) => Err(config.unsupported("attention_bias", "biases of compressed attention")),
                _ => Ok(()),
            }
        },
        |_| Some(false.into()),
    ),
    Field::only("mlp_bias", false, "biases of the feed-forward layers of this model type"),
    fields::KV_HEADS.or(Otherwise::Integer(1)),
    fields::HEAD_DIM.or(Otherwise::Integer(512)),
    // Every layer has experts.
    Field::with(
        &["intermediate_size", "moe_intermediate_size"],
        |config, settings| {
            let width = config.integer("moe_intermediate_size")?.or(config.integer("intermediate_size")?);
            settings.set("base_mlp_dim", width.unwrap_or(2048));
            Ok(())
        },
        |_| None,
    ),
    Field::silent("moe_intermediate_size", |model| Some(model.group.moe_mlp_dim().into())),
    Field::new("q_lora_rank", "q_lora_rank", Kind::Integer, |model| {
        Some(model.group.latent.q_lora_rank.into())
    })
    .or(Otherwise::Integer(1024)),
    Field::new("o_lora_rank", "o_lora_rank", Kind::Integer, |model| {
        Some(model.group.compressed.o_lora_rank.into())
    })
    .or(Otherwise::Integer(1024)),
    Field::new("o_groups", "o_groups", Kind::Integer, |model| Some(model.group.compressed.o_groups.into()))
        .or(Otherwise::Integer(8)),
    Field::new("index_n_heads", "indexer_n_heads", Kind::Integer, |model| {
        Some(model.group.compressed.indexer_n_heads.into())
    })
    .or(Otherwise::Integer(64)),
    Field::new("index_head_dim", "indexer_head_dim", Kind::Integer, |model| {
        Some(model.group.compressed.indexer_head_dim.into())
    })
    .or(Otherwise::Integer(128)),
    Field::new("index_topk", "indexer_topk", Kind::Integer, |model| {
        Some(model.group.compressed.indexer_topk.into())
    })
    .or(Otherwise::Integer(512)),
    fields::WINDOW.or(Otherwise::Integer(128)),
    Field::with(
        &["layer_types", "compress_rates", "compress_ratios", "compress_rate_csa", "compress_rate_hca"],
        read_ratios,
        |model| {
            let kind = |ratio: &usize| match ratio {
                0 => WINDOW,
                ratio if CompressedGroup::is_indexed(*ratio) => SPARSE,
                _ => HEAVY,
            };
            let kinds: Vec<&str> = model.group.compressed.compress_ratios.iter().map(kind).collect();
            Some(json!(kinds))
        },
    ),
    Field::silent("compress_rates", |model| {
        let ratios = &model.group.compressed.compress_ratios;
        let ratio_of = |indexed: bool| {
            let is_own = |ratio: &&usize| **ratio > 0 && CompressedGroup::is_indexed(**ratio) == indexed;
            ratios.iter().find(is_own).copied()
        };
        Some(json!({ SPARSE: ratio_of(true).unwrap_or(4), HEAVY: ratio_of(false).unwrap_or(128) }))
    }),
    Field::with(&["mlp_layer_types", "num_hash_layers"], read_hash_layers, |model| {
        let hashed = model.group.experts.first_num_hash_layers;
        let kind = |index| if index < hashed { BY_TOKEN } else { BY_SCORE };
        Some(json!((0..model.config.layers.len()).map(kind).collect::<Vec<_>>()))
    }),
    Field::with(&ROPE_KEYS, read_rope, |model| Some(written_rope(model))),
    Field::silent("rope_theta", |model| Some(model.group.positions.rope_max_timescale.into())),
    Field::silent("compress_rope_theta", |model| {
        Some((model.group.compressed.compressed_rope_max_timescale as f64).into())
    }),
    Field::silent("partial_rotary_factor", |model| Some(share(model.group).into())),
    Field::silent("qk_rope_head_dim", |model| Some(model.group.latent.qk_rope_head_dim.into())),
    Field::new("hc_mult", "mhc_expansion_rate", Kind::Integer, |model| {
        Some(model.group.hyper_connections.mhc_expansion_rate.into())
    })
    .or(Otherwise::Integer(4)),
    Field::new("hc_sinkhorn_iters", "sinkhorn_iterations", Kind::Integer, |model| {
        Some(model.group.hyper_connections.sinkhorn_iterations.into())
    })
    .or(Otherwise::Integer(20)),
    Field::with(
        &["hc_eps"],
        |config, _| match config.number("hc_eps")? {
            Some(epsilon) if epsilon != 1e-6 => {
                Err(config.unsupported("hc_eps", "another offset of the weights of residual streams"))
            }
            _ => Ok(()),
        },
        |_| Some(1e-6.into()),
    ),
    Field::with(
        &["n_routed_experts", "num_local_experts"],
        |config, settings| {
            let number = config.integer("n_routed_experts")?.or(config.integer("num_local_experts")?);
            settings.set("num_experts", number.unwrap_or(256));
            Ok(())
        },
        |model| Some(model.group.experts.num_experts.into()),
    ),
    fields::EXPERTS_PER_TOKEN.or(Otherwise::Integer(6)),
    // Files may state more, but there is one expert that every token uses.
    Field::with(
        &["n_shared_experts"],
        |config, settings| {
            settings.set("shared_experts", 1);
            match config.integer("n_shared_experts")? {
                Some(count) if count != 1 => Err(config
                    .unsupported("n_shared_experts", "another number of shared experts of this model type")),
                _ => Ok(()),
            }
        },
        |_| Some(1.into()),
    ),
    Field::new("routed_scaling_factor", "routed_scaling_factor", Kind::Number, |model| {
        Some(model.group.experts.routed_scaling_factor.into())
    })
    .or(Otherwise::Number(1.5)),
    Field::new("swiglu_limit", "mlp_activations_limit", Kind::Number, |model| {
        Some(model.group.layers.mlp_activations_limit.into())
    })
    .or(Otherwise::Number(10.0)),
    Field::with(
        &["scoring_func", "topk_method"],
        |config, _| match config.text("scoring_func")?.as_deref() {
            None | Some("sqrtsoftplus") => Ok(()),
            _ => Err(config.unsupported("scoring_func", "other scores of experts of this model type")),
        },
        |_| Some("sqrtsoftplus".into()),
    ),
    Field::only("norm_topk_prob", true, "weights of experts that are not normalized"),
    Field::silent("num_nextn_predict_layers", |model| Some(model.group.mtp_num_layers.into())),
    // The type of published experts.
    Field::silent("expert_dtype", |_| None),
];

/// The keys of rotary embeddings, the newest first.
const ROPE_KEYS: [&str; 6] = [
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "compress_rope_theta",
    "partial_rotary_factor",
    "qk_rope_head_dim",
];

/// The share of each head that is rotated.
fn share(group: &ModelGroup) -> f64 {
    group.latent.qk_rope_head_dim as f64 / group.head_dim as f64
}

/// The number of tokens in each layer's blocks, from the kinds of layers or from the numbers of older files.
fn read_ratios(config: &HuggingFaceConfig, settings: &mut Settings) -> Result<(), ModelError> {
    let num_layers = config.required("num_hidden_layers")?.max(0) as usize;
    let rates = config.object("compress_rates")?.unwrap_or_default();
    let rate = |kind: &str, older: &str, default: i64| -> Result<i64, ModelError> {
        let newer = rates.get(kind).and_then(Value::as_i64);
        Ok(config.integer(older)?.or(newer).unwrap_or(default))
    };
    let sparse = rate(SPARSE, "compress_rate_csa", 4)?;
    let heavy = rate(HEAVY, "compress_rate_hca", 128)?;
    if !usize::try_from(sparse).is_ok_and(CompressedGroup::is_indexed) {
        return Err(config.unsupported("compress_rates", "blocks of another size with an indexer"));
    }
    let kinds: Vec<String> = match (config.layer_kinds()?, config.integers("compress_ratios")?) {
        (Some(kinds), _) => kinds,
        (None, Some(ratios)) => {
            let kind = |ratio: &i64| match *ratio {
                0 => Ok(WINDOW.to_owned()),
                4 => Ok(SPARSE.to_owned()),
                128 => Ok(HEAVY.to_owned()),
                _ => Err(config.unsupported("compress_ratios", "blocks of this size")),
            };
            ratios.iter().map(kind).collect::<Result<_, _>>()?
        }
        (None, None) => {
            let kind = |index: usize| if index >= 2 && index % 2 == 1 { SPARSE } else { HEAVY };
            (0..num_layers).map(|index| kind(index).to_owned()).collect()
        }
    };
    let ratio = |kind: &String| match kind.as_str() {
        WINDOW => Ok(0),
        SPARSE => Ok(sparse),
        HEAVY => Ok(heavy),
        _ => Err(config.unsupported("layer_types", "this kind of layer")),
    };
    // Older files also state the ratios of modules that predict further tokens.
    let ratios: Vec<i64> = kinds.iter().take(num_layers).map(ratio).collect::<Result<_, _>>()?;
    if ratios.len() != num_layers {
        return Err(config.wrong("layer_types", &json!(kinds), "a list of one kind for each layer"));
    }
    settings.set("compress_ratios", ratios);
    Ok(())
}

/// The number of layers that choose experts by token, which are the first ones.
fn read_hash_layers(config: &HuggingFaceConfig, settings: &mut Settings) -> Result<(), ModelError> {
    let num_layers = config.required("num_hidden_layers")?;
    let count = match config.value("mlp_layer_types").and_then(Value::as_array) {
        Some(kinds) => {
            let is_hashed = |kind: &Value| kind.as_str() == Some(BY_TOKEN);
            let count = kinds.iter().take_while(|kind| is_hashed(kind)).count();
            let is_known = |kind: &Value| kind.as_str() == Some(BY_SCORE);
            if !kinds[count..].iter().all(is_known) {
                let feature = "experts that are chosen by token behind others, or this kind of layer";
                return Err(config.unsupported("mlp_layer_types", feature));
            }
            count as i64
        }
        None => config.integer("num_hash_layers")?.unwrap_or(3).min(num_layers),
    };
    settings.set("first_num_hash_layers", count);
    Ok(())
}

/// Reads the rotary embedding of layers with a window alone (`main`), and that of the others (`compress`).
fn read_rope(config: &HuggingFaceConfig, settings: &mut Settings) -> Result<(), ModelError> {
    let head_dim = settings.get("head_dim").and_then(Value::as_i64).unwrap_or(512);
    let [main, compress] = [config.rope("main")?, config.rope("compress")?];
    let of_kinds = config.object("rope_parameters")?.is_some_and(|nested| nested.contains_key("compress"));
    if of_kinds && main.kind.as_deref().is_some_and(|kind| kind != "default") {
        let feature = "scaling the rotary embeddings of layers with a window";
        return Err(config.unsupported("rope_parameters", feature));
    }
    let number = |key: &str, default: f64| Ok::<f64, ModelError>(config.number(key)?.unwrap_or(default));
    let theta = main.theta.filter(|_| of_kinds).map_or_else(|| number("rope_theta", 10_000.0), Ok)?;
    let compressed =
        compress.theta.filter(|_| of_kinds).map_or_else(|| number("compress_rope_theta", 160_000.0), Ok)?;
    rope::read_scaling(config, &compress, settings)?;
    if compress.kind.as_deref() == Some("yarn") && compress.values.number("attention_factor")?.is_none() {
        settings.set("rope_attention_factor", 1.0);
    }
    settings.set("rope_max_timescale", theta);
    settings.set("compressed_rope_max_timescale", compressed as i64);
    let rotated = match config.integer("qk_rope_head_dim")? {
        Some(rotated) => rotated,
        None => (compress.partial.unwrap_or(0.125) * head_dim as f64) as i64,
    };
    settings.set("qk_rope_head_dim", rotated);
    Ok(())
}

fn written_rope(model: &Described<'_>) -> Value {
    let positions = &model.group.positions;
    let with = |mut own: Map<String, Value>, theta: f64| {
        own.insert("rope_theta".into(), theta.into());
        own.insert("partial_rotary_factor".into(), share(model.group).into());
        Value::from(own)
    };
    let mut scaled = match rope::written(model.group, model.config) {
        Value::Object(scaled) => scaled,
        _ => Map::new(),
    };
    if positions.rope_type == RopeType::Yarn {
        scaled.insert("attention_factor".into(), positions.rope_attention_factor.unwrap_or(1.0).into());
    }
    let mut plain = Map::new();
    plain.insert("rope_type".into(), "default".into());
    let compressed = model.group.compressed.compressed_rope_max_timescale as f64;
    json!({ "main": with(plain, positions.rope_max_timescale), "compress": with(scaled, compressed) })
}

const MODEL: &[TensorName] = &[
    table("token_embedder.embedding", "model.embed_tokens.weight", 1),
    vector("final_norm.scale", "model.norm.weight"),
    matrix("head.kernel", "head.weight"),
    matrix("hc_head.hc_fn", "model.hc_head.hc_fn"),
    vector("hc_head.hc_base", "model.hc_head.hc_base"),
    vector("hc_head.hc_scale", "model.hc_head.hc_scale"),
    vector("pre_attention_norm.scale", "model.layers.{layer}.attn_norm.weight"),
    vector("pre_mlp_norm.scale", "model.layers.{layer}.ffn_norm.weight"),
];

const ATTENTION: &[TensorName] = &[
    matrix("compressed_attention.wq_a.kernel", "model.layers.{layer}.attn.wq_a.weight"),
    vector("compressed_attention.q_norm.scale", "model.layers.{layer}.attn.q_norm.weight"),
    matrix("compressed_attention.wq_b.kernel", "model.layers.{layer}.attn.wq_b.weight"),
    matrix("compressed_attention.wkv.kernel", "model.layers.{layer}.attn.wkv.weight"),
    vector("compressed_attention.kv_norm.scale", "model.layers.{layer}.attn.norm.weight"),
    vector("compressed_attention.sinks", "model.layers.{layer}.attn.attn_sink"),
    names::of_groups("compressed_attention.o_a_proj.kernel", "model.layers.{layer}.attn.wo_a.weight"),
    matrix("compressed_attention.o_b_proj.kernel", "model.layers.{layer}.attn.wo_b.weight"),
    matrix(
        "compressed_attention.hca_compressor.kv_proj.kernel",
        "model.layers.{layer}.attn.compressor.wkv.weight",
    ),
    matrix(
        "compressed_attention.hca_compressor.gate_proj.kernel",
        "model.layers.{layer}.attn.compressor.wgate.weight",
    ),
    table("compressed_attention.hca_compressor.position_bias", "model.layers.{layer}.attn.compressor.ape", 1),
    vector(
        "compressed_attention.hca_compressor.kv_norm.scale",
        "model.layers.{layer}.attn.compressor.norm.weight",
    ),
    matrix(
        "compressed_attention.csa_compressor.kv_proj.kernel",
        "model.layers.{layer}.attn.compressor.wkv.weight",
    ),
    matrix(
        "compressed_attention.csa_compressor.gate_proj.kernel",
        "model.layers.{layer}.attn.compressor.wgate.weight",
    ),
    table("compressed_attention.csa_compressor.position_bias", "model.layers.{layer}.attn.compressor.ape", 1),
    vector(
        "compressed_attention.csa_compressor.kv_norm.scale",
        "model.layers.{layer}.attn.compressor.norm.weight",
    ),
    matrix(
        "compressed_attention.csa_compressor.indexer.kv_proj.kernel",
        "model.layers.{layer}.attn.indexer.compressor.wkv.weight",
    ),
    matrix(
        "compressed_attention.csa_compressor.indexer.gate_proj.kernel",
        "model.layers.{layer}.attn.indexer.compressor.wgate.weight",
    ),
    table(
        "compressed_attention.csa_compressor.indexer.position_bias",
        "model.layers.{layer}.attn.indexer.compressor.ape",
        1,
    ),
    vector(
        "compressed_attention.csa_compressor.indexer.kv_norm.scale",
        "model.layers.{layer}.attn.indexer.compressor.norm.weight",
    ),
    matrix(
        "compressed_attention.csa_compressor.indexer.q_proj.kernel",
        "model.layers.{layer}.attn.indexer.wq_b.weight",
    ),
    matrix(
        "compressed_attention.csa_compressor.indexer.weights_proj.kernel",
        "model.layers.{layer}.attn.indexer.weights_proj.weight",
    ),
];

const EXPERTS: &[TensorName] = &[
    matrix("experts.gate.kernel", "model.layers.{layer}.ffn.gate.weight"),
    vector("experts.gate.bias", "model.layers.{layer}.ffn.gate.bias"),
    table("experts.tid2eid", "model.layers.{layer}.ffn.gate.tid2eid", 1),
    each_expert("experts.wi_0", "model.layers.{layer}.ffn.experts.{expert}.w1.weight"),
    each_expert("experts.wi_1", "model.layers.{layer}.ffn.experts.{expert}.w3.weight"),
    each_expert("experts.wo", "model.layers.{layer}.ffn.experts.{expert}.w2.weight"),
    matrix("experts.shared.wi_0.kernel", "model.layers.{layer}.ffn.shared_experts.w1.weight"),
    matrix("experts.shared.wi_1.kernel", "model.layers.{layer}.ffn.shared_experts.w3.weight"),
    matrix("experts.shared.wo.kernel", "model.layers.{layer}.ffn.shared_experts.w2.weight"),
];

const ATTENTION_FN: &str = "model.layers.{layer}.hc_attn_fn";
const ATTENTION_BASE: &str = "model.layers.{layer}.hc_attn_base";
const ATTENTION_SCALE: &str = "model.layers.{layer}.hc_attn_scale";
const MLP_FN: &str = "model.layers.{layer}.hc_ffn_fn";
const MLP_BASE: &str = "model.layers.{layer}.hc_ffn_base";
const MLP_SCALE: &str = "model.layers.{layer}.hc_ffn_scale";

/// The three blocks of a matrix, or of a vector, of a connection.
const fn rows(role: &'static str, name: &'static str, index: usize) -> TensorName {
    matrix(role, name).fused(Along::Rows, index, FusedOrder::Concatenated)
}

const fn numbers(role: &'static str, name: &'static str, index: usize) -> TensorName {
    vector(role, name).fused(Along::Columns, index, FusedOrder::Concatenated)
}

const CONNECTIONS: &[TensorName] = &[
    rows("mhc_attention.pre_alpha", ATTENTION_FN, 0),
    rows("mhc_attention.post_alpha", ATTENTION_FN, 1),
    rows("mhc_attention.res_alpha", ATTENTION_FN, 2),
    numbers("mhc_attention.pre_beta", ATTENTION_BASE, 0),
    numbers("mhc_attention.post_beta", ATTENTION_BASE, 1),
    numbers("mhc_attention.res_beta", ATTENTION_BASE, 2),
    numbers("mhc_attention.pre_alpha_scale", ATTENTION_SCALE, 0),
    numbers("mhc_attention.post_alpha_scale", ATTENTION_SCALE, 1),
    numbers("mhc_attention.res_alpha_scale", ATTENTION_SCALE, 2),
    rows("mhc_mlp.pre_alpha", MLP_FN, 0),
    rows("mhc_mlp.post_alpha", MLP_FN, 1),
    rows("mhc_mlp.res_alpha", MLP_FN, 2),
    numbers("mhc_mlp.pre_beta", MLP_BASE, 0),
    numbers("mhc_mlp.post_beta", MLP_BASE, 1),
    numbers("mhc_mlp.res_beta", MLP_BASE, 2),
    numbers("mhc_mlp.pre_alpha_scale", MLP_SCALE, 0),
    numbers("mhc_mlp.post_alpha_scale", MLP_SCALE, 1),
    numbers("mhc_mlp.res_alpha_scale", MLP_SCALE, 2),
];

/// The parameters around the layer of a module that predicts further tokens.
const PREDICTIONS: &[TensorName] = &[
    vector("predictions.embedding_norm.scale", "model.layers.{layer}.enorm.weight"),
    vector("predictions.hidden_norm.scale", "model.layers.{layer}.hnorm.weight"),
    matrix("predictions.e_proj.kernel", "model.layers.{layer}.e_proj.weight"),
    matrix("predictions.h_proj.kernel", "model.layers.{layer}.h_proj.weight"),
    matrix("predictions.hc_head.hc_fn", "model.layers.{layer}.hc_head.hc_fn"),
    vector("predictions.hc_head.hc_base", "model.layers.{layer}.hc_head.hc_base"),
    vector("predictions.hc_head.hc_scale", "model.layers.{layer}.hc_head.hc_scale"),
    vector("predictions.final_norm.scale", "model.layers.{layer}.norm.weight"),
];

/// The names of transformers' modules, and those in files that it writes. The first match counts.
const MODULES: &[(&str, &str)] = &[
    ("attn.indexer.wq_b.", "self_attn.compressor.indexer.q_b_proj."),
    ("attn.indexer.weights_proj.", "self_attn.compressor.indexer.scorer.weights_proj."),
    ("attn.indexer.compressor.wkv.", "self_attn.compressor.indexer.kv_proj."),
    ("attn.indexer.compressor.wgate.", "self_attn.compressor.indexer.gate_proj."),
    ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
    ("attn.indexer.compressor.norm.", "self_attn.compressor.indexer.kv_norm."),
    ("attn.compressor.wkv.", "self_attn.compressor.kv_proj."),
    ("attn.compressor.wgate.", "self_attn.compressor.gate_proj."),
    ("attn.compressor.ape", "self_attn.compressor.position_bias"),
    ("attn.compressor.norm.", "self_attn.compressor.kv_norm."),
    ("attn.wq_a.", "self_attn.q_a_proj."),
    ("attn.q_norm.", "self_attn.q_a_norm."),
    ("attn.wq_b.", "self_attn.q_b_proj."),
    ("attn.wkv.", "self_attn.kv_proj."),
    ("attn.norm.", "self_attn.kv_norm."),
    ("attn.attn_sink", "self_attn.sinks"),
    ("attn.wo_a.", "self_attn.o_a_proj."),
    ("attn.wo_b.", "self_attn.o_b_proj."),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.shared_experts.w1.", "mlp.shared_experts.gate_proj."),
    ("ffn.shared_experts.w3.", "mlp.shared_experts.up_proj."),
    ("ffn.shared_experts.w2.", "mlp.shared_experts.down_proj."),
    ("ffn.", "mlp."),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
    ("attn_norm.", "input_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
];

/// The names of a tensor in the layout of DeepSeek's own files, and by the modules of transformers. The scales of
/// quantized files have no names here, because they appear with their weights.
fn other_names(name: &str) -> Vec<String> {
    let Some(inside) = name.strip_prefix("model.") else {
        return vec![name.replace("head.weight", "lm_head.weight")];
    };
    let of_layer = inside.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
    let by_module = of_layer.and_then(|(layer, rest)| {
        let (theirs, module) = MODULES.iter().find(|(theirs, _)| rest.starts_with(theirs))?;
        Some(format!("model.layers.{layer}.{module}{}", &rest[theirs.len()..]))
    });
    std::iter::once(released(inside)).chain(by_module).collect()
}

/// The name in DeepSeek's own files of a tensor of the model, or of one of a layer.
fn released(inside: &str) -> String {
    match inside {
        "embed_tokens.weight" => "embed.weight".to_owned(),
        // transformers writes the norm of keys under another name.
        _ => inside.replace("hc_head.hc_", "hc_head_").replace("attn.norm.", "attn.kv_norm."),
    }
}
