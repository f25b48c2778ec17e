//! Several adapters of one model, among which the rows of a batch choose.
//!
//! Each adapter is read in the form of its own: a PEFT directory by layers, and a run's checkpoint as the run stacked its
//! layers. Their arrays are then placed side by side, with ranks padded to the largest one and with zeros in weights that an
//! adapter leaves as they are.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

use mt_config::{LoraGroup, ModelGroup};
use mt_nn::{Adapter, AdapterArray, ParamSpec, WITHOUT_MAGNITUDE};
use mt_runtime::Runtime;
use mt_shape::{DType, HostArray, Placement};

use super::{
    AdapterOptions, StateError, Storage, WeightsOrigin,
    adapted::{adapter_indices, read_adapters},
    state::converted,
};
use crate::{
    ForwardPass, Model, ModelError,
    decoder::{AdapterConfig, AdapterTargets, Decoder, DecoderConfig, Parameter, Place, SegmentForm},
    families::{build_decoder, peft_modules},
    hugging_face::is_peft,
};

/// Weights in layers that are also used as one array, or whose product has an axis of groups. A product with an adapter of
/// each row cannot replace theirs.
const USED_WHOLE: [&str; 2] = ["wkv_b", "o_a_proj"];

/// A model with adapters among which rows choose, and the adapters' arrays.
pub struct RowAdapters {
    pub model: Box<dyn Model>,
    /// The arrays of adapters in the model's order, with the indices of their parameters. They have the type of
    /// activations, except learned norms, which are as they were saved.
    pub arrays: Vec<(usize, HostArray)>,
}

/// An adapter by weights and layers.
struct OneAdapter {
    rank: usize,
    scale: f64,
    has_magnitude: bool,
    values: HashMap<(String, usize), Values>,
}

/// The arrays of a weight of one layer.
#[derive(Default)]
struct Values {
    a: Vec<f32>,
    b: Vec<f32>,
    magnitude: Option<Vec<f32>>,
}

/// Reads the adapters at `sources`, PEFT directories or runs, of the model that `group` describes without adapters and whose
/// weights are at `base`.
///
/// # Errors
/// Adapters are damaged, do not fit the model, or adapt weights whose adapters cannot differ by row.
pub fn read_row_adapters(
    group: &ModelGroup,
    base: &Path,
    sources: &[PathBuf],
    runtime: &Runtime,
    placement: &Placement,
) -> Result<RowAdapters, StateError> {
    let mut origin = None;
    let read = |source: &PathBuf| read_one(group, base, source, (runtime, placement), &mut origin);
    let adapters: Vec<OneAdapter> = sources.iter().map(read).collect::<Result<_, StateError>>()?;
    let dense = build_decoder(group)?;
    let segments = dense.config().segments();
    let mut targets = BTreeSet::new();
    for (role, layer) in adapters.iter().flat_map(|adapter| adapter.values.keys()) {
        let segment = segments.iter().find(|segment| segment.layers().contains(layer));
        let segment = segment.expect("adapters belong to layers of the model");
        // The layers of a scanned stack have the same weights. The first one stands for all.
        let layer = match segment.form {
            SegmentForm::Scanned { .. } => segment.first + (layer - segment.first) % segment.kinds.len(),
            SegmentForm::Single => *layer,
        };
        targets.insert((role.clone(), Some(layer)));
    }
    let most = |of: fn(&OneAdapter) -> usize| adapters.iter().map(of).max().unwrap_or(1);
    let config = AdapterConfig {
        adapter: Adapter {
            rank: most(|adapter| adapter.rank),
            // Each adapter has a factor of its own, which its `B` contains.
            scale: 1.0,
            has_magnitude: adapters.iter().any(|adapter| adapter.has_magnitude),
            dropout: 0.0,
            choices: Some(adapters.len()),
        },
        alpha: 1.0,
        is_rank_stabilized: false,
        targets: AdapterTargets::These(Arc::new(targets)),
        module_path: String::new(),
        base_format: dense.config().weight_format,
        has_arrays: true,
    };
    let config = DecoderConfig { adapters: Some(config), ..dense.config().clone() };
    let model = Decoder::new(config, dense.family());
    let parameters = model.parameters();
    let array = |index: usize| {
        let (path, spec) = &parameters[index];
        let of = Parameter::of(&segments, path, spec);
        let array = spec.adapter.expect("the index is that of an adapter's array");
        let made = Stacked { spec, array, adapters: &adapters }.of_layers(&of);
        let dtype = match array {
            AdapterArray::Magnitude => DType::F32,
            _ => model.config().dtype,
        };
        (index, converted(made, dtype))
    };
    let arrays = adapter_indices(&model).into_iter().map(array).collect();
    Ok(RowAdapters { model: Box::new(model), arrays })
}

/// The weight of an adapter's array, by the array's role.
fn role_of_weight(role: &str) -> String {
    role.rsplit_once('.').map_or_else(String::new, |(weight, _)| weight.to_owned())
}

/// An array of all adapters of a weight.
struct Stacked<'a> {
    spec: &'a ParamSpec,
    array: AdapterArray,
    adapters: &'a [OneAdapter],
}

impl Stacked<'_> {
    fn of_layers(&self, of: &Parameter) -> HostArray {
        let Self { spec, array, adapters } = *self;
        let dims = spec.dims();
        let (weight, layers) = (role_of_weight(&of.role), of.layers());
        let filling = if array == AdapterArray::Magnitude { WITHOUT_MAGNITUDE } else { 0.0 };
        let mut elements = vec![filling; dims.iter().product()];
        let size_of_layer = elements.len() / layers.len();
        for (layer, elements) in layers.iter().zip(elements.chunks_exact_mut(size_of_layer)) {
            // The axis of adapters follows that of layers.
            let size = size_of_layer / dims[spec.num_layer_axes()];
            for (number, adapter) in adapters.iter().enumerate() {
                let Some(values) = adapter.values.get(&(weight.clone(), *layer)) else { continue };
                match array {
                    AdapterArray::A => {
                        let rank = *dims.last().expect("`A` has the axis of the rank");
                        let own = &mut elements[number * size..][..size];
                        let rows = own.chunks_exact_mut(rank).zip(values.a.chunks_exact(adapter.rank));
                        rows.for_each(|(to, from)| to[..adapter.rank].copy_from_slice(from));
                    }
                    AdapterArray::B => {
                        let own = &mut elements[number * size..][..values.b.len()];
                        let scale = adapter.scale;
                        let scaled = values.b.iter().map(|value| (f64::from(*value) * scale) as f32);
                        own.iter_mut().zip(scaled).for_each(|(to, from)| *to = from);
                    }
                    AdapterArray::Magnitude => {
                        // The first choice is that of no adapter.
                        let own = &mut elements[(number + 1) * size..][..size];
                        if let Some(magnitude) = &values.magnitude {
                            own.copy_from_slice(magnitude);
                        }
                    }
                    AdapterArray::Whole => unreachable!("rows choose among low-rank adapters"),
                }
            }
        }
        HostArray::from_slice(DType::F32, &dims, &elements).expect("there is an element for each index")
    }
}

fn read_one(
    group: &ModelGroup,
    base: &Path,
    source: &Path,
    (runtime, placement): (&Runtime, &Placement),
    origin: &mut Option<WeightsOrigin>,
) -> Result<OneAdapter, StateError> {
    let model = model_of(group, source)?;
    let segments = model.config().segments();
    let parameters = model.parameters();
    let indices = adapter_indices(&model);
    for index in &indices {
        let (path, spec) = &parameters[*index];
        let of = Parameter::of(&segments, path, spec);
        let is_in_layer = !matches!(of.place, Place::Model | Place::Prediction(_));
        if !is_in_layer || USED_WHOLE.iter().any(|name| of.role.contains(name)) {
            let tensors = model.adapter_tensors().unwrap_or_default();
            let holds = |section: &crate::hugging_face::TensorSection| section.parameter == *index;
            let tensor = tensors.into_iter().find(|tensor| tensor.sections.iter().any(holds));
            let module = tensor.map_or_else(|| path.to_string(), |tensor| tensor.name);
            return Err(ModelError::AdaptersNotByRow { path: source.to_owned(), module }.into());
        }
    }
    let arrays = read_adapters(&model, source, base, (runtime, placement), origin)?;
    let adapter = model.adapters().expect("the model has adapters").adapter;
    let mut values: HashMap<(String, usize), Values> = HashMap::new();
    for (index, array) in indices.into_iter().zip(arrays) {
        let (path, spec) = &parameters[index];
        let of = Parameter::of(&segments, path, spec);
        let host = converted(array.to_host()?, DType::F32);
        let elements: &[f32] = host.as_slice().expect("the array was converted");
        let layers = of.layers();
        let slices = elements.chunks_exact(elements.len() / layers.len());
        for (layer, elements) in layers.iter().zip(slices) {
            let own = values.entry((role_of_weight(&of.role), *layer)).or_default();
            match spec.adapter {
                Some(AdapterArray::A) => own.a = elements.to_vec(),
                Some(AdapterArray::B) => own.b = elements.to_vec(),
                Some(AdapterArray::Magnitude) => own.magnitude = Some(elements.to_vec()),
                Some(AdapterArray::Whole) | None => {}
            }
        }
    }
    let Adapter { rank, scale, has_magnitude, .. } = adapter;
    Ok(OneAdapter { rank, scale, has_magnitude, values })
}

/// The model with the adapters at a path alone.
fn model_of(group: &ModelGroup, source: &Path) -> Result<Decoder, StateError> {
    if !source.exists() {
        return Err(StateError::NoAdapters { path: source.to_owned() });
    }
    let options = AdapterOptions::at(source)?;
    let options = options.ok_or_else(|| StateError::NoAdapters { path: source.to_owned() })?;
    let with = |scan_layers: bool, module_path: String| {
        let lora = LoraGroup {
            enable_lora: true,
            lora_rank: options.rank,
            lora_alpha: options.alpha,
            lora_module_path: module_path,
            lora_dropout: 0.0,
            lora_weight_qtype: None,
            lora_tile_size: None,
            use_rslora: options.use_rslora,
            use_dora: options.use_dora,
        };
        ModelGroup { scan_layers, lora, ..group.clone() }
    };
    if is_peft(source) {
        // PEFT names the modules of each layer, so that some layers may have no adapters.
        let modules = peft_modules(&with(false, String::new()), source)?;
        return Ok(build_decoder(&with(false, modules))?);
    }
    // The expression names the modules of a run with layers that were stacked or not, which the base's need not be.
    let modules = options.module_path.clone().unwrap_or_default();
    match build_decoder(&with(group.scan_layers, modules.clone())) {
        Err(ModelError::LoraMatchesNothing { .. }) => Ok(build_decoder(&with(!group.scan_layers, modules))?),
        built => Ok(built?),
    }
}
