//! The documents of a run's examples.

use std::sync::Arc;

use super::{Dataset, Documents, Order};
use crate::random::key;

/// Maps the number of an example, which grows through all epochs, to the index of its document. The orders of the current
/// epochs are kept; any example can be requested at any time.
#[derive(Debug)]
pub(crate) struct Visits {
    dataset: Arc<Dataset>,
    shuffle: Option<u64>,
    /// The epoch and the order of each source.
    orders: Vec<Option<(u64, Order)>>,
}

impl Visits {
    /// The order for a seed; without one, the order of the files.
    pub(crate) fn new(dataset: Arc<Dataset>, shuffle: Option<u64>) -> Self {
        let sources = match &dataset.documents {
            Documents::Mixture(mixture) => mixture.parts.len(),
            _ => 1,
        };
        Self { dataset, shuffle, orders: vec![None; sources] }
    }

    pub(crate) fn document(&mut self, example: u64) -> u64 {
        let dataset = self.dataset.clone();
        match &dataset.documents {
            Documents::Mixture(mixture) => {
                let (source, number) = mixture.schedule.draw(example);
                // Sources of the same size have different orders.
                let seed = self.shuffle.map(|seed| key(&[seed, source as u64 + 1]));
                mixture.firsts[source] + self.of_source(source, &mixture.parts[source], seed, number)
            }
            _ => self.of_source(0, &dataset, self.shuffle, example),
        }
    }

    fn of_source(&mut self, source: usize, dataset: &Dataset, seed: Option<u64>, example: u64) -> u64 {
        let size = dataset.num_documents();
        let (epoch, position) = (example / size, example % size);
        let current = &mut self.orders[source];
        if current.as_ref().is_none_or(|(known, _)| *known != epoch) {
            *current = Some((epoch, dataset.order(seed.map(|seed| key(&[seed, epoch])))));
        }
        current.as_ref().map_or(position, |(_, order)| order.document(position))
    }
}
