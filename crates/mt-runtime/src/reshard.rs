//! Arrays that move from one mesh to another, on the devices.

use std::sync::Arc;

use mt_ir::{
    Boundary, Graph, Memory, Precision, PrintOptions, Program, TensorType, eliminate_dead_code, print_program,
};
use mt_shape::{Mesh, Sharding};

use crate::{Array, CompileSettings, Executable, Input, Runtime, RuntimeError};

/// The name of the programs that gather arrays on one mesh and split them on another.
pub const RESHARD_PROGRAM: &str = "reshard";

/// The compiled movement of arrays with known shardings to others, perhaps over other devices. No array passes through
/// host memory.
///
/// If each device of the new mesh gets the shard of a device of the old one, shards are copied from device to device.
/// Other arrays are gathered on all devices of the old mesh, copied whole, and split on the new mesh, a number of arrays at
/// a time, because each device then holds them whole.
pub struct Resharding {
    runtime: Runtime,
    to: Vec<Sharding>,
    /// The arrays whose shards are copied as they are.
    direct: Vec<usize>,
    gathered: Vec<Gathered>,
}

/// Arrays that are gathered and split together.
struct Gathered {
    arrays: Vec<usize>,
    gather: Executable,
    split: Executable,
}

impl Resharding {
    /// Compiles the movement of arrays with these types and shardings. `at_once` limits the arrays that are gathered
    /// together; all are if `None`.
    ///
    /// # Errors
    /// A program cannot be compiled.
    ///
    /// # Panics
    /// The lists differ in length.
    pub fn new(
        runtime: &Runtime,
        from: &[(TensorType, Sharding)],
        to: &[Sharding],
        at_once: Option<usize>,
        settings: &CompileSettings,
    ) -> Result<Self, RuntimeError> {
        assert_eq!(from.len(), to.len(), "each array has a new sharding");
        let is_direct = |index: &usize| is_same_split(&from[*index].0, &from[*index].1, &to[*index]);
        let (direct, others): (Vec<usize>, Vec<usize>) = (0..from.len()).partition(is_direct);
        let most = at_once.unwrap_or(others.len()).max(1);
        let gathered = others
            .chunks(most)
            .map(|arrays| {
                let types: Vec<TensorType> = arrays.iter().map(|index| from[*index].0.clone()).collect();
                let old: Vec<Sharding> = arrays.iter().map(|index| from[*index].1.clone()).collect();
                let new: Vec<Sharding> = arrays.iter().map(|index| to[*index].clone()).collect();
                let gather = identity(runtime, &types, &old, &whole(&old));
                let split = identity(runtime, &types, &whole(&new), &new);
                Ok(Gathered {
                    arrays: arrays.to_vec(),
                    gather: runtime.compile(&gather, settings)?,
                    split: runtime.compile(&split, settings)?,
                })
            })
            .collect::<Result<_, RuntimeError>>()?;
        Ok(Self { runtime: runtime.clone(), to: to.to_vec(), direct, gathered })
    }

    /// The arrays with their new shardings. The movement goes on while this function returns.
    ///
    /// # Errors
    /// The arrays do not have the known types and shardings, or a device's memory is full.
    pub fn run(&self, arrays: &[Array]) -> Result<Vec<Array>, RuntimeError> {
        let mut made: Vec<Option<Array>> = arrays.iter().map(|_| None).collect();
        for index in &self.direct {
            made[*index] = Some(arrays[*index].copied_to(&self.runtime, &self.to[*index])?);
        }
        for Gathered { arrays: indices, gather, split } in &self.gathered {
            let inputs = indices.iter().map(|index| Input::Borrow(&arrays[*index])).collect();
            let whole = gather.run(inputs)?;
            let copies: Result<Vec<Array>, RuntimeError> = whole
                .iter()
                .zip(split.inputs())
                .map(|(array, value)| array.copied_to(&self.runtime, &value.sharding))
                .collect();
            let inputs = copies?.into_iter().map(Input::Donate).collect();
            for (index, array) in indices.iter().zip(split.run(inputs)?) {
                made[*index] = Some(array);
            }
        }
        Ok(made.into_iter().map(|array| array.expect("each array moves in one way")).collect())
    }
}

/// Whether each place of the new mesh holds the same shard as that of the old one.
fn is_same_split(ty: &TensorType, from: &Sharding, to: &Sharding) -> bool {
    let places = from.mesh.num_devices();
    places == to.mesh.num_devices()
        && (0..places).all(|place| from.shard_ranges(&ty.dims, place) == to.shard_ranges(&ty.dims, place))
}

/// Shardings of whole arrays over the same meshes.
fn whole(shardings: &[Sharding]) -> Vec<Sharding> {
    shardings.iter().map(|one| Sharding::replicated(one.mesh.clone(), one.spec.0.len())).collect()
}

/// The program that returns its arguments with other shardings.
fn identity(runtime: &Runtime, types: &[TensorType], from: &[Sharding], to: &[Sharding]) -> Program {
    let mesh: Arc<Mesh> = from[0].mesh.clone();
    let mut graph = Graph::new();
    let inputs = types.iter().map(|ty| graph.input(ty.clone())).collect();
    graph.set_outputs(inputs);
    let boundary = |(index, sharding): (usize, &Sharding)| Boundary {
        name: format!("array.{index}"),
        sharding: sharding.clone(),
        donated: false,
        memory: Memory::Device,
    };
    let inputs: Vec<Boundary> = from.iter().enumerate().map(boundary).collect();
    let outputs: Vec<Boundary> = to.iter().enumerate().map(boundary).collect();
    let options = PrintOptions {
        name: RESHARD_PROGRAM.to_owned(),
        mesh,
        target: runtime.target(),
        precision: Precision::Default,
    };
    print_program(&eliminate_dead_code(&graph), &inputs, &outputs, &options)
}
