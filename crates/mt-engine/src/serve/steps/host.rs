//! Pages that move between the devices and host memory.

use std::ops::Deref;

use mt_runtime::{Array, Input};
use mt_shape::{DType, HostArray, Sharding};

use super::{DeviceSteps, PageMove, StepKey, Weights};
use crate::{
    EngineError,
    serve::{pages::NULL_PAGE, program::MOVED_PAGES},
};

impl<P: Deref<Target: AsRef<[Array]>>> DeviceSteps<P> {
    pub(super) fn save_pages(&mut self, forgotten: &[u64], saved: &[PageMove]) -> Result<(), EngineError> {
        forgotten.iter().for_each(|number| drop(self.host.remove(number)));
        for (pool, moves) in calls(saved) {
            let executable = self.executable(StepKey::TakePages { pool }, Weights::Absent)?;
            let numbers = self.page_numbers(&moves)?;
            let inputs =
                self.programs.arrays_of(pool).into_iter().map(|index| Input::from(&self.pools[index]));
            let outputs = executable.run(inputs.chain([Input::from(&numbers)]).collect())?;
            let arrays: Vec<HostArray> = outputs.iter().map(Array::to_host).collect::<Result<_, _>>()?;
            for (place, moved) in moves.iter().enumerate() {
                let pages = arrays.iter().map(|array| {
                    let bytes = array.bytes().len() / MOVED_PAGES;
                    let page = &array.bytes()[place * bytes..][..bytes];
                    HostArray::from_bytes(array.dtype(), &array.dims()[1..], page)
                });
                let pages: Vec<HostArray> = pages.collect::<Result<_, _>>().expect("a page has its bytes");
                self.host.insert(moved.number, pages);
            }
        }
        Ok(())
    }

    pub(super) fn restore_pages(&mut self, restored: &[PageMove]) -> Result<(), EngineError> {
        for (pool, moves) in calls(restored) {
            let executable = self.executable(StepKey::PutPages { pool }, Weights::Absent)?;
            let numbers = self.page_numbers(&moves)?;
            let indices = self.programs.arrays_of(pool);
            let mut contents = Vec::with_capacity(indices.len());
            for array in 0..indices.len() {
                let pages: Vec<&HostArray> =
                    moves.iter().map(|moved| &self.host[&moved.number][array]).collect();
                let dims = [&[MOVED_PAGES], pages[0].dims()].concat();
                let mut all = HostArray::zeros(pages[0].dtype(), &dims);
                let bytes = all.bytes().len() / MOVED_PAGES;
                for (to, page) in all.bytes_mut().chunks_exact_mut(bytes).zip(pages) {
                    to.copy_from_slice(page.bytes());
                }
                contents.push(self.replicated(&all)?);
            }
            let mut rest: Vec<Option<Array>> =
                std::mem::take(&mut self.pools).into_iter().map(Some).collect();
            let given: Vec<Array> = indices.iter().filter_map(|index| rest[*index].take()).collect();
            let inputs = given.into_iter().map(Input::Donate);
            let inputs = inputs.chain([Input::from(&numbers)]).chain(contents.iter().map(Input::from));
            for (index, pool) in indices.into_iter().zip(executable.run(inputs.collect())?) {
                rest[index] = Some(pool);
            }
            self.pools = rest.into_iter().flatten().collect();
        }
        Ok(())
    }

    /// The pages of a call's moves on the device. Those that fill the call are the null page.
    fn page_numbers(&self, moves: &[PageMove]) -> Result<Array, EngineError> {
        let mut numbers = [NULL_PAGE as i32; MOVED_PAGES];
        numbers.iter_mut().zip(moves).for_each(|(number, moved)| *number = moved.page as i32);
        Ok(self.array(DType::I32, &[MOVED_PAGES], &numbers)?)
    }

    fn replicated(&self, host: &HostArray) -> Result<Array, EngineError> {
        let mesh = self.programs.programs.placement.mesh().clone();
        Ok(Array::from_host(&self.runtime, host, &Sharding::replicated(mesh, host.dims().len()))?)
    }
}

/// The moves of each call, with their pool.
fn calls(moves: &[PageMove]) -> Vec<(usize, Vec<PageMove>)> {
    let mut pools: Vec<usize> = moves.iter().map(|moved| moved.pool).collect();
    pools.sort_unstable();
    pools.dedup();
    let mut calls = Vec::new();
    for pool in pools {
        let own: Vec<PageMove> = moves.iter().filter(|moved| moved.pool == pool).copied().collect();
        calls.extend(own.chunks(MOVED_PAGES).map(|moves| (pool, moves.to_vec())));
    }
    calls
}
