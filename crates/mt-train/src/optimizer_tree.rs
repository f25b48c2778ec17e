//! The tree of an optimizer's state in checkpoints, as MaxText's chains of optax transformations define it.

use mt_checkpoint::KeySegment;
use mt_optim::{AdamForm, Muon, Optimizer};
use mt_shape::{DType, HostArray};

use crate::update::UpdateRule;

type Key = Vec<KeySegment>;

/// The checkpoint keys of an optimizer's state.
#[derive(Default)]
pub(crate) struct OptimizerTree {
    /// The parent key of the slots of each sub-optimizer; `None` is an optimizer without sub-optimizers.
    pub slots: Vec<(Option<&'static str>, Key)>,
    /// The update counters.
    pub counts: Vec<Key>,
    /// The history for spike detection.
    pub history: Option<HistoryKeys>,
    /// Arrays whose values never change during training.
    pub constants: Vec<(Key, HostArray)>,
    /// Transformations without state.
    pub empty: Vec<Key>,
    /// The value that checkpoints hold for a trained parameter without the slot, such as one that Adafactor does not
    /// factor.
    pub placeholder: Option<HostArray>,
}

pub(crate) struct HistoryKeys {
    pub losses: Key,
    pub gradient_norms: Key,
    pub count: Key,
}

impl OptimizerTree {
    pub fn new(rule: &UpdateRule) -> Self {
        let mut tree = Self::default();
        let mut root: Key = vec!["opt_state".into()];
        if rule.masks_training {
            let of = |label: &str| extended(&root, [key("inner_states"), key(label), key("inner_state")]);
            tree.empty.push(of("frozen"));
            root = of("trainable");
        }
        if rule.guard.is_some() {
            tree.history = Some(HistoryKeys {
                losses: extended(&root, [key("losses")]),
                gradient_norms: extended(&root, [key("grad_norms")]),
                count: extended(&root, [key("count")]),
            });
            let no = HostArray::zeros(DType::Bool, &[]);
            tree.constants.push((extended(&root, [key("is_skipped")]), no));
            root = extended(&root, [key("inner_state")]);
        }
        match &rule.optimizer {
            Optimizer::Adam(adam) if adam.form == AdamForm::Pax => {
                tree.counts.push(extended(&root, [key("count")]));
                tree.slots.push((None, root));
            }
            Optimizer::Adam(_) => {
                let decay = if rule.masks_decay { Holds::NothingWithin } else { Holds::Nothing };
                tree.chain(None, &root, &[Holds::State, decay, Holds::Count]);
            }
            Optimizer::Sgd => tree.chain(None, &root, &[Holds::Nothing, Holds::Count]),
            Optimizer::Muon(muon) => {
                for sub_optimizer in rule.optimizer.sub_optimizers() {
                    let root = extended(&root, [key("inner_states"), key(sub_optimizer), key("inner_state")]);
                    if *sub_optimizer == Muon::ADAM {
                        tree.chain(
                            Some(*sub_optimizer),
                            &root,
                            &[Holds::State, Holds::Nothing, Holds::Count],
                        );
                        continue;
                    }
                    let chain = [Holds::State, Holds::Nothing, Holds::Nothing, Holds::Count];
                    tree.chain(Some(*sub_optimizer), &root, &chain);
                    let coefficients = muon.iterations.stored();
                    tree.constants.push((extended(&root, [0.into(), key("ns_coeffs")]), coefficients));
                }
            }
            Optimizer::Adafactor(_) => {
                let chain = [Holds::State, Holds::Nothing, Holds::Count, Holds::Nothing, Holds::Nothing];
                tree.chain(None, &root, &chain);
                tree.placeholder = Some(HostArray::zeros(DType::F32, &[1]));
            }
        }
        tree
    }

    fn chain(&mut self, sub_optimizer: Option<&'static str>, root: &[KeySegment], transformations: &[Holds]) {
        for (index, holds) in transformations.iter().enumerate() {
            let own = extended(root, [index.into()]);
            match holds {
                Holds::State => {
                    self.counts.push(extended(&own, [key("count")]));
                    self.slots.push((sub_optimizer, own));
                }
                Holds::Count => self.counts.push(extended(&own, [key("count")])),
                Holds::Nothing => self.empty.push(own),
                Holds::NothingWithin => self.empty.push(extended(&own, [key("inner_state")])),
            }
        }
    }

    /// The parent key of a sub-optimizer's slots.
    pub fn of_sub_optimizer(&self, sub_optimizer: Option<&'static str>) -> &[KeySegment] {
        let found = self.slots.iter().find(|(own, _)| *own == sub_optimizer);
        &found.expect("each sub-optimizer has a key").1
    }
}

/// The state of one transformation in a chain.
enum Holds {
    /// Slots and the update counter.
    State,
    /// The update counter alone.
    Count,
    Nothing,
    /// No state, within the state of a mask around the transformation.
    NothingWithin,
}

fn key(name: &str) -> KeySegment {
    name.into()
}

fn extended<const N: usize>(root: &[KeySegment], more: [KeySegment; N]) -> Key {
    root.iter().cloned().chain(more).collect()
}
