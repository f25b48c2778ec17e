//! Where an optimizer's state is in checkpoints: in the places that MaxText's chains of optax transformations give it.

use mt_checkpoint::KeySegment;
use mt_optim::{AdamForm, Muon, NEWTON_SCHULZ, Optimizer};
use mt_shape::{DType, HostArray};

use crate::update::UpdateRule;

type Key = Vec<KeySegment>;

/// The places of an optimizer's state.
#[derive(Default)]
pub(crate) struct OptimizerTree {
    /// For each part of the optimizer (`None` if it has none), what holds its slots.
    pub slots: Vec<(Option<&'static str>, Key)>,
    /// The numbers of updates.
    pub counts: Vec<Key>,
    /// What is needed to tell spikes.
    pub history: Option<HistoryKeys>,
    /// What never changes here.
    pub constants: Vec<(Key, HostArray)>,
    /// What holds nothing.
    pub empty: Vec<Key>,
    /// What stands for slots that are not kept for a parameter, though it is trained by their part.
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
            Optimizer::Muon(_) => {
                for part in rule.optimizer.parts() {
                    let root = extended(&root, [key("inner_states"), key(part), key("inner_state")]);
                    if *part == Muon::ADAM {
                        tree.chain(Some(*part), &root, &[Holds::State, Holds::Nothing, Holds::Count]);
                        continue;
                    }
                    let chain = [Holds::State, Holds::Nothing, Holds::Nothing, Holds::Count];
                    tree.chain(Some(*part), &root, &chain);
                    let coefficients = NEWTON_SCHULZ.map(|coefficient| coefficient as f32);
                    let coefficients = HostArray::from_slice(DType::F32, &[3], &coefficients)
                        .expect("there are three coefficients");
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

    fn chain(&mut self, part: Option<&'static str>, root: &[KeySegment], transformations: &[Holds]) {
        for (index, holds) in transformations.iter().enumerate() {
            let own = extended(root, [index.into()]);
            match holds {
                Holds::State => {
                    self.counts.push(extended(&own, [key("count")]));
                    self.slots.push((part, own));
                }
                Holds::Count => self.counts.push(extended(&own, [key("count")])),
                Holds::Nothing => self.empty.push(own),
                Holds::NothingWithin => self.empty.push(extended(&own, [key("inner_state")])),
            }
        }
    }

    /// What holds the slots of a part.
    pub fn of_part(&self, part: Option<&'static str>) -> &[KeySegment] {
        let found = self.slots.iter().find(|(own, _)| *own == part);
        &found.expect("each part of an optimizer has a place").1
    }
}

/// What a transformation of a chain keeps.
enum Holds {
    /// Slots and the number of updates.
    State,
    /// The number of updates.
    Count,
    Nothing,
    /// Nothing, in the transformation that a mask is about.
    NothingWithin,
}

fn key(name: &str) -> KeySegment {
    name.into()
}

fn extended<const N: usize>(root: &[KeySegment], more: [KeySegment; N]) -> Key {
    root.iter().cloned().chain(more).collect()
}
