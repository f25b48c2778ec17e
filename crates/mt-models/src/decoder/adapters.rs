//! The adapters of a decoder's linear maps.

use std::{
    cell::Cell,
    collections::{BTreeSet, HashSet},
    rc::Rc,
    sync::Arc,
};

use mt_nn::{Adapter, ParamSpec, Weight, WeightFormat};
use mt_shape::{Path, Tree};

use super::{DecoderConfig, DecoderParameters, SegmentForm, part::SpecBuilder};

/// The adapters of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    pub adapter: Adapter,
    /// The number that is divided by the rank, or by its root with rsLoRA, to give the factor of adapters.
    pub alpha: f64,
    /// Whether the divisor is the rank's root (rsLoRA).
    pub is_rank_stabilized: bool,
    pub targets: AdapterTargets,
    /// The expression that chose them; empty for the usual ones.
    pub module_path: String,
    /// The format of the frozen weights below adapters.
    pub base_format: &'static dyn WeightFormat,
    /// Whether the weights have the arrays of adapters. The frozen base alone has none.
    pub has_arrays: bool,
}

/// The weights that have adapters.
#[derive(Clone, Debug, PartialEq)]
pub enum AdapterTargets {
    /// All linear maps.
    All,
    /// These roles, in these layers, or outside of layers.
    These(Arc<BTreeSet<(String, Option<usize>)>>),
}

impl AdapterConfig {
    fn includes(&self, role: &str, layer: Option<usize>) -> bool {
        match &self.targets {
            AdapterTargets::All => true,
            AdapterTargets::These(weights) => weights.contains(&(role.to_owned(), layer)),
        }
    }
}

impl DecoderConfig {
    /// Whether training drops activations, or inputs of adapters.
    pub(super) fn drops(&self) -> bool {
        self.dropout_rate > 0.0 || self.drops_inputs_of_adapters()
    }

    /// Whether training drops inputs of adapters.
    pub(super) fn drops_inputs_of_adapters(&self) -> bool {
        self.adapters.as_ref().is_some_and(|adapters| adapters.adapter.dropout > 0.0)
    }

    /// Whether a weight has an adapter. For a scanned stack, `layer` is the first one.
    pub(super) fn adapts(&self, role: &str, layer: Option<usize>) -> bool {
        self.adapters.as_ref().is_some_and(|adapters| adapters.includes(role, layer))
    }

    /// Whether all layers of each scanned stack have the same adapters.
    pub(crate) fn adapts_whole_stacks(&self) -> bool {
        let Some(AdapterConfig { targets: AdapterTargets::These(weights), .. }) = &self.adapters else {
            return true;
        };
        self.segments().iter().all(|segment| {
            let (SegmentForm::Scanned { repeats }, length) = (segment.form, segment.kinds.len()) else {
                return true;
            };
            let of_stack = weights.iter().filter_map(|(role, layer)| Some((role, (*layer)?)));
            let inside = of_stack.filter(|(_, layer)| segment.layers().contains(layer));
            inside.into_iter().all(|(role, layer)| {
                let slot = (layer - segment.first) % length;
                let stack = (0..repeats).map(|cycle| segment.first + slot + cycle * length);
                stack.into_iter().all(|layer| weights.contains(&(role.clone(), Some(layer))))
            })
        })
    }
}

/// How the weights of a model are declared. Declarations do not know the paths of their weights, so that they are
/// numbered: a first pass finds the number of each path, and a second one gives adapters to the chosen numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct Declarations {
    pass: Pass,
    next: Rc<Cell<usize>>,
}

#[derive(Clone, Debug, Default)]
enum Pass {
    /// No weight has an adapter.
    #[default]
    Plain,
    /// The roles of weights are their numbers.
    Numbered,
    /// These weights have adapters, above weights of this format.
    Adapted { adapter: Option<Adapter>, base: &'static dyn WeightFormat, chosen: Rc<HashSet<usize>> },
}

impl Declarations {
    /// Declares the next weight, as [`Weight::declare`].
    pub fn declare(
        &self,
        format: &'static dyn WeightFormat,
        dense: ParamSpec,
        num_inputs: usize,
    ) -> Weight<ParamSpec> {
        let number = self.next.get();
        self.next.set(number + 1);
        match &self.pass {
            Pass::Numbered => {
                let numbered = ParamSpec { role: number.to_string(), ..dense };
                Weight::declare(format, numbered, num_inputs)
            }
            Pass::Adapted { adapter, base, chosen } if chosen.contains(&number) => match adapter {
                Some(adapter) => Weight::declare_adapted(*base, dense, num_inputs, *adapter),
                None => Weight::declare(*base, dense, num_inputs),
            },
            Pass::Plain | Pass::Adapted { .. } => Weight::declare(format, dense, num_inputs),
        }
    }
}

/// The parameters that `declare` declares, with adapters for the weights whose paths `adapts` accepts.
pub(super) fn with_adapters<T>(
    config: &DecoderConfig,
    adapts: impl Fn(&Path) -> bool,
    declare: impl Fn(&SpecBuilder) -> T,
) -> T
where
    T: Tree<Leaf = ParamSpec>,
{
    let Some(AdapterConfig { adapter, base_format: base, has_arrays, .. }) = config.adapters else {
        return declare(&config.builder());
    };
    let adapter = Some(adapter).filter(|_| has_arrays);
    let within = |pass| {
        let declarations = Declarations { pass, next: Rc::default() };
        declare(&SpecBuilder { declarations, ..config.builder() })
    };
    let numbered = within(Pass::Numbered).leaves().into_iter().filter_map(|(path, spec)| {
        let (path, spec) = spec.stored_form(&path);
        let number: usize = spec.role.parse().ok()?;
        adapts(&path).then_some(number)
    });
    within(Pass::Adapted { adapter, base, chosen: Rc::new(numbered.collect()) })
}

/// The same parameters, of which only adapters are trained.
pub(super) fn frozen(specs: &DecoderParameters<ParamSpec>) -> DecoderParameters<ParamSpec> {
    specs.map_leaves(|_, spec| ParamSpec {
        is_trainable: spec.is_trainable && spec.adapter.is_some(),
        ..spec.clone()
    })
}
