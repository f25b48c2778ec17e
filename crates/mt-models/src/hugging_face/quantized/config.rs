//! The object `quantization_config` of a `config.json`.

use mt_config::nearest_names;
use serde_json::{Map, Value, json};

use super::patterns::{Closeness, Pattern};
use crate::{ModelError, hugging_face::HuggingFaceConfig};

const KEY: &str = "quantization_config";
const METHOD: &str = "quant_method";

/// The quantization of a model's weights.
#[derive(Debug)]
pub struct Quantization {
    pub method: Method,
    /// The key that lists the modules without quantized weights.
    pub list: &'static str,
    /// The modules in that list.
    pub dense: Vec<Pattern>,
    /// The keys that nothing reads.
    pub unread: Vec<String>,
}

/// The form of quantized weights.
#[derive(Debug)]
pub enum Method {
    Fp8(Fp8),
    Mxfp4,
    /// Integers of 4 bits in words of 32.
    Packed(Vec<PackedGroup>),
}

/// Numbers of 8 bits with scales.
#[derive(Debug)]
pub struct Fp8 {
    /// The rows and columns of a block that shares a scale; `None` means the whole tensor.
    pub block: Option<[usize; 2]>,
    /// Whether scales of one byte are exponents.
    pub has_exponents: bool,
    /// The stated type of the experts' weights.
    pub experts: Option<ExpertCodes>,
}

/// The codes of experts' weights in a model whose other weights have 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertCodes {
    /// Numbers of 8 bits, as other weights.
    Fp8,
    /// Numbers of 4 bits, two in a byte.
    Fp4,
}

/// A set of modules whose weights are packed in the same way.
#[derive(Debug)]
pub struct PackedGroup {
    targets: Vec<Pattern>,
    /// The number of adjacent inputs that share a scale.
    pub size: usize,
}

impl Method {
    /// The name in `config.json`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fp8(_) => "fp8",
            Self::Mxfp4 => "mxfp4",
            Self::Packed(_) => "compressed-tensors",
        }
    }
}

const METHODS: [(&str, Read); 3] =
    [("fp8", read_fp8), ("mxfp4", read_mxfp4), ("compressed-tensors", read_compressed)];

/// Reads the settings of a method from the object and from the whole `config.json`.
type Read = fn(&HuggingFaceConfig, &HuggingFaceConfig) -> Result<Quantization, ModelError>;

impl Quantization {
    /// The quantization that a `config.json` states; `None` if the weights are not quantized.
    ///
    /// # Errors
    /// The method or one of its settings is unknown or unsupported.
    pub fn of(config: &HuggingFaceConfig) -> Result<Option<Self>, ModelError> {
        let Some(values) = config.object(KEY)? else { return Ok(None) };
        let own = config.nested(KEY, values);
        let name = own.text(METHOD)?.ok_or_else(|| own.missing(METHOD))?;
        let Some((_, read)) = METHODS.iter().find(|(known, _)| *known == name) else {
            let known = METHODS.map(|(known, _)| known);
            let nearest = nearest_names(&name, known);
            let hint = match nearest.first() {
                Some(nearest) => format!("did you mean `{nearest}`? The methods that are read are"),
                None => "the methods that are read are".to_owned(),
            };
            let all = known.map(|known| format!("`{known}`")).join(", ");
            let feature = "reading weights that are quantized by this method";
            return Err(refused(&own, METHOD, feature, format!("{hint} {all}")));
        };
        read(&own, config).map(Some)
    }

    /// The module's pattern in the list of modules without quantized weights.
    pub fn dense_pattern(&self, module: &str) -> Option<&Pattern> {
        self.dense.iter().find(|pattern| pattern.matches(module))
    }
}

impl PackedGroup {
    /// The group of a module, the one whose target describes it most closely.
    pub fn of_module<'a>(groups: &'a [Self], module: &str) -> Option<&'a Self> {
        let closeness = |group: &Self| -> Option<Closeness> {
            group.targets.iter().filter_map(|target| target.closeness(module)).max()
        };
        let mut found: Option<(Closeness, &Self)> = None;
        for group in groups {
            // The first of several equally close groups counts.
            if let Some(closeness) = closeness(group)
                && found.is_none_or(|(other, _)| closeness > other)
            {
                found = Some((closeness, group));
            }
        }
        found.map(|(_, group)| group)
    }
}

fn read_fp8(own: &HuggingFaceConfig, whole: &HuggingFaceConfig) -> Result<Quantization, ModelError> {
    const LISTS: [&str; 2] = ["modules_to_not_convert", "ignored_layers"];
    only(own, "fmt", &["e4m3"], "this format of 8 bits")?;
    only(own, "activation_scheme", &["dynamic", "static"], "this scheme of activations")?;
    only(own, "scale_fmt", &["float", "ue8m0"], "this format of scales")?;
    let pair = |value: &Value| -> Option<[usize; 2]> {
        let sizes: Option<Vec<usize>> = value
            .as_array()?
            .iter()
            .map(|size| size.as_u64().filter(|size| *size > 0))
            .map(|size| size.map(|size| size as usize))
            .collect();
        sizes?.try_into().ok()
    };
    let stated = own.get("weight_block_size", "a list of two sizes, such as [128, 128]", pair)?;
    let block = if own.is_null("weight_block_size") { None } else { Some(stated.unwrap_or([128, 128])) };
    let list = LISTS[usize::from(!own.has(LISTS[0]) && own.has(LISTS[1]))];
    let has_exponents = own.text("scale_fmt")?.as_deref() == Some("ue8m0");
    let read = [
        "weight_block_size",
        "fmt",
        "activation_scheme",
        "scale_fmt",
        EXPERT_TYPE,
        "modules_to_convert",
        "dequantize",
    ];
    Ok(Quantization {
        method: Method::Fp8(Fp8 { block, has_exponents, experts: expert_codes(own, whole)? }),
        list,
        dense: patterns(own, list, Pattern::of_transformers)?,
        unread: unread(own, &[&read[..], &LISTS].concat()),
    })
}

const EXPERT_TYPE: &str = "expert_dtype";

/// The type of the experts' weights, which DeepSeek-V4's files state outside of the object.
fn expert_codes(
    own: &HuggingFaceConfig,
    whole: &HuggingFaceConfig,
) -> Result<Option<ExpertCodes>, ModelError> {
    let stated = if own.has(EXPERT_TYPE) { own } else { whole };
    only(stated, EXPERT_TYPE, &["fp8", "fp4"], "this type of experts' weights")?;
    let code = |name: String| if name == "fp4" { ExpertCodes::Fp4 } else { ExpertCodes::Fp8 };
    Ok(stated.text(EXPERT_TYPE)?.map(code))
}

fn read_mxfp4(own: &HuggingFaceConfig, _: &HuggingFaceConfig) -> Result<Quantization, ModelError> {
    const LIST: &str = "modules_to_not_convert";
    Ok(Quantization {
        method: Method::Mxfp4,
        list: LIST,
        dense: patterns(own, LIST, Pattern::of_transformers)?,
        unread: unread(own, &[LIST, "dequantize"]),
    })
}

const PACKED: &str = "pack-quantized";

fn read_compressed(own: &HuggingFaceConfig, _: &HuggingFaceConfig) -> Result<Quantization, ModelError> {
    const LIST: &str = "ignore";
    only(own, "quantization_status", &["compressed"], "weights that are still to be compressed")?;
    none(own, "kv_cache_scheme", "a quantized cache")?;
    none(own, "transform_config", "transformed weights")?;
    let sparsity = own.object("sparsity_config")?.unwrap_or_default();
    only(&own.nested("sparsity_config", sparsity), "format", &["dense"], "sparse weights")?;
    let groups = own.object("config_groups")?.ok_or_else(|| own.missing("config_groups"))?;
    let groups = own.nested("config_groups", groups);
    let mut read = Vec::new();
    let mut others = unread(
        own,
        &[
            LIST,
            "quantization_status",
            "kv_cache_scheme",
            "transform_config",
            "sparsity_config",
            "config_groups",
            "format",
            "global_compression_ratio",
            "version",
        ],
    );
    let names: Vec<String> = groups.values().map(|(name, _)| name.to_owned()).collect();
    for name in &names {
        let values = groups.object(name)?.unwrap_or_default();
        let group = groups.nested(name, values);
        let stated = if group.has("format") { &group } else { own };
        only(stated, "format", &[PACKED], "this format of compressed tensors")?;
        if stated.text("format")?.is_none() {
            return Err(stated.missing("format"));
        }
        read.push(packed_group(&group, &mut others)?);
    }
    Ok(Quantization {
        method: Method::Packed(read),
        list: LIST,
        dense: patterns(own, LIST, Pattern::of_compressed)?,
        unread: others,
    })
}

fn packed_group(group: &HuggingFaceConfig, others: &mut Vec<String>) -> Result<PackedGroup, ModelError> {
    none(group, "input_activations", "quantized activations")?;
    none(group, "output_activations", "quantized activations")?;
    let weights = group.object("weights")?.ok_or_else(|| group.missing("weights"))?;
    let weights = group.nested("weights", weights);
    let bits = weights.integer("num_bits")?.ok_or_else(|| weights.missing("num_bits"))?;
    if bits != 4 {
        return Err(refused(
            &weights,
            "num_bits",
            "this number of bits",
            "packed weights are read if they have 4 bits".to_owned(),
        ));
    }
    only(&weights, "type", &["int"], "this type of weights")?;
    if weights.boolean("symmetric")? == Some(false) {
        return Err(refused(
            &weights,
            "symmetric",
            "zero points",
            "packed weights are read if they are symmetric".to_owned(),
        ));
    }
    only(&weights, "strategy", &["group"], "this distribution of scales")?;
    if weights
        .get("dynamic", "true, false or a text", |value| Some(value.clone()))?
        .is_some_and(|value| value != json!(false))
    {
        return Err(refused(
            &weights,
            "dynamic",
            "scales that are computed later",
            "the scales of packed weights are read from files".to_owned(),
        ));
    }
    let ordering = weights.value("actorder").filter(|value| !value.is_null() && **value != json!(false));
    // The order of calibration does not change the format.
    if ordering.is_some_and(|value| !["weight", "static"].iter().any(|known| *value == json!(known))) {
        return Err(refused(
            &weights,
            "actorder",
            "activation ordering",
            "packed weights are read if their columns are in order".to_owned(),
        ));
    }
    let size = weights.integer("group_size")?.ok_or_else(|| weights.missing("group_size"))?;
    let size = usize::try_from(size).ok().filter(|size| *size > 0);
    let size = size.ok_or_else(|| {
        weights.wrong("group_size", &weights.value("group_size").cloned().unwrap_or_default(), "at least 1")
    })?;
    let targets = patterns(group, "targets", Pattern::of_target)?;
    others
        .extend(unread(group, &["targets", "weights", "input_activations", "output_activations", "format"]));
    others.extend(unread(
        &weights,
        &[
            "num_bits",
            "type",
            "symmetric",
            "strategy",
            "dynamic",
            "actorder",
            "group_size",
            "block_structure",
            "scale_dtype",
            "zp_dtype",
            "observer",
            "observer_kwargs",
        ],
    ));
    Ok(PackedGroup { targets, size })
}

/// The patterns in a list.
fn patterns(
    own: &HuggingFaceConfig,
    key: &str,
    read: fn(&str) -> Result<Pattern, fancy_regex::Error>,
) -> Result<Vec<Pattern>, ModelError> {
    let texts = |value: &Value| -> Option<Vec<Pattern>> {
        value.as_array()?.iter().map(|text| read(text.as_str()?).ok()).collect()
    };
    Ok(own.get(key, "a list of names and regular expressions of modules", texts)?.unwrap_or_default())
}

/// Refuses other texts than the known ones.
fn only(own: &HuggingFaceConfig, key: &str, known: &[&str], feature: &str) -> Result<(), ModelError> {
    match own.text(key)? {
        Some(text) if !known.contains(&text.as_str()) => {
            let known: Vec<String> = known.iter().map(|known| format!("`{known}`")).collect();
            Err(refused(own, key, feature, format!("it is read if it is {}", known.join(" or "))))
        }
        _ => Ok(()),
    }
}

/// Refuses any value.
fn none(own: &HuggingFaceConfig, key: &str, feature: &str) -> Result<(), ModelError> {
    let is_empty = own.value(key).and_then(Value::as_object).is_some_and(Map::is_empty);
    if !own.has(key) || is_empty {
        return Ok(());
    }
    Err(refused(own, key, feature, "a model without it is read".to_owned()))
}

fn refused(own: &HuggingFaceConfig, key: &str, feature: &str, hint: String) -> ModelError {
    let value = own.value(key).map(Value::to_string).unwrap_or_default();
    let problem = format!("`{value}`, but {feature} is not built yet");
    ModelError::Quantization { path: own.path().to_owned(), key: own.full_key(key), problem, hint }
}

/// The keys that are not among the known ones.
fn unread(own: &HuggingFaceConfig, known: &[&str]) -> Vec<String> {
    let others = own.values().filter(|(key, _)| *key != METHOD && !known.contains(key));
    others.map(|(key, _)| own.full_key(key)).collect()
}
