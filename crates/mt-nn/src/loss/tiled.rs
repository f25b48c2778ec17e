//! Token losses whose logits are computed tile by tile.

use mt_derive::Tree;
use mt_shape::{Axis, DType, LogicalAxis, axis};
use mt_trace::{Region, ScanOptions, Tensor};

use super::{TokenLoss, narrow_token_loss, token_loss, token_weights};
use crate::axes::{BATCH, POSITION};

pub(super) const TILE: &str = "tile";

/// A function from its parameters and hidden states to logits.
type Head<'a> = dyn for<'b> Fn(&[Tensor<'b>], Tensor<'b>) -> Tensor<'b> + 'a;

/// The head of a model, evaluated together with the loss in tiles of tokens.
///
/// The gradients of hidden states and parameters are computed with the loss, tile by tile, and scaled once its
/// cotangent is known. Recomputing logits in the backward pass would need a fourth matrix product in addition to the
/// three, and would save no memory: the backward pass begins with these gradients, so they exist at the peak of memory
/// use anyway.
#[derive(Clone, Copy)]
pub struct TiledHead<'a> {
    /// The number of tiles, a divisor of the number of positions.
    pub tiles: usize,
    /// The multiplier of the z-loss in [`TiledHead::token_loss`].
    pub z_loss_multiplier: f64,
    /// Whether each token's loss is computed in `f32` rather than in the type of the logits.
    pub in_f32: bool,
    /// The function from parameters and hidden states to logits. It is traced several times and captures no tensors.
    pub head: &'a Head<'a>,
    /// The logical axes of each of the head's parameters, which also place their gradients.
    pub logical_axes: &'a [Vec<Option<LogicalAxis>>],
    /// Logical axes that are gathered once for all tiles instead of once per tile.
    pub gathered: &'a [LogicalAxis],
}

/// The arrays that a scan over tiles slices.
#[derive(Tree)]
struct Tile<L> {
    hidden: L,
    targets: L,
    segmentation: L,
}

#[derive(Tree)]
pub(super) struct Differentiated<L> {
    pub hidden: L,
    pub parameters: Vec<L>,
}

/// The arrays of tokens that a scan over tiles slices.
#[derive(Tree)]
struct TokenArrays<L>(Vec<L>);

/// Sums over all tokens, from the sums of each tile of positions: `sums_of` receives `captured` and the tile's slices of
/// `tokens`. The backward pass computes each tile again, so that no array of all logits exists.
///
/// # Shapes
/// `[…], [batch, position, …] -> f32[]`
#[track_caller]
pub fn sums_in_tiles<'t>(
    tiles: usize,
    captured: &[Tensor<'t>],
    tokens: &[Tensor<'t>],
    num_sums: usize,
    sums_of: impl for<'b> Fn(&[Tensor<'b>], &[Tensor<'b>]) -> Vec<Tensor<'b>>,
) -> Vec<Tensor<'t>> {
    let region = tokens[0].region();
    let zeros = vec![region.full(DType::F32, &[], 0.0); num_sums];
    let slices = TokenArrays(tokens.iter().map(|tensor| cut(*tensor, tiles)).collect());
    let options = ScanOptions::over(axis(TILE, tiles));
    let (sums, _) = region.scan_lists(options, &zeros, &slices, |_, sums, tile| {
        let captured: Vec<Tensor<'_>> = captured.to_vec();
        (added(&sums, &sums_of(&captured, &tile.0)), Vec::new())
    });
    sums
}

impl TiledHead<'_> {
    /// The summed loss of all tokens whose segment id is not 0.
    ///
    /// # Shapes
    /// `[batch, position, embed], parameters, i32[batch, position], i32[batch, position] -> f32[], f32[]`
    #[track_caller]
    pub fn token_loss<'t>(
        &self,
        parameters: &[Tensor<'t>],
        hidden: Tensor<'t>,
        targets: Tensor<'t>,
        segmentation: Tensor<'t>,
    ) -> TokenLoss<'t> {
        let arguments = [parameters, &[hidden, targets, segmentation]].concat();
        let differentiable: Vec<bool> = (0..arguments.len()).map(|index| index <= parameters.len()).collect();
        let sums = hidden.region().custom_vjp_list(
            "tiled_loss",
            &arguments,
            &differentiable,
            |region, arguments| self.primal(region, &arguments),
            |region, arguments| self.forward(region, &arguments),
            |_, gradients, cotangents| self.backward(&gradients, &cotangents),
        );
        TokenLoss {
            total: sums[0],
            z_loss: sums.get(1).copied().map(Tensor::stop_gradient),
            weights: token_weights(segmentation).sum(&[BATCH, POSITION]),
        }
    }

    /// The sums over tokens of all terms and, if the z-loss is configured, of the z-loss alone.
    fn primal<'b>(&self, region: Region<'b>, arguments: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        let (parameters, tiles) = self.split(arguments);
        let zeros = vec![region.full(DType::F32, &[], 0.0); self.num_terms()];
        let options = ScanOptions::over(axis(TILE, self.tiles));
        let (sums, _) = region.scan_lists(options, &zeros, &tiles, |_, sums, tile| {
            let parameters: Vec<Tensor<'_>> = parameters.clone();
            let terms = self.terms(&parameters, tile.hidden, tile.targets, tile.segmentation);
            (added(&sums, &terms), Vec::new())
        });
        sums
    }

    /// The same sums, with the gradients of the first one as residuals: those of all parameters, then those of the
    /// hidden states.
    fn forward<'b>(
        &self,
        region: Region<'b>,
        arguments: &[Tensor<'b>],
    ) -> (Vec<Tensor<'b>>, Vec<Tensor<'b>>) {
        let (parameters, tiles) = self.split(arguments);
        let num_terms = self.num_terms();
        let mut carry = vec![region.full(DType::F32, &[], 0.0); num_terms];
        carry.extend(self.zeros(region, &parameters));
        let options = ScanOptions::over(axis(TILE, self.tiles));
        let (mut sums, of_hidden) = region.scan_lists(options, &carry, &tiles, |region, carry, tile| {
            let differentiated = Differentiated { hidden: tile.hidden, parameters: parameters.clone() };
            let (_, terms, gradients) = region.value_and_grad_list(&differentiated, |_, given| {
                let terms = self.terms(&given.parameters, given.hidden, tile.targets, tile.segmentation);
                (terms[0], terms)
            });
            let of_parameters = self.placed(&gradients.parameters);
            (added(&carry, &[terms, of_parameters].concat()), vec![gradients.hidden])
        });
        let mut gradients = sums.split_off(num_terms);
        gradients.push(joined(of_hidden[0], arguments[parameters.len()]));
        (sums, gradients)
    }

    fn backward<'b>(&self, gradients: &[Tensor<'b>], cotangents: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        // The sum of the z-loss is only a metric: `token_loss` stops its gradient.
        let scale = cotangents[0];
        gradients.iter().map(|gradient| (gradient.cast(DType::F32) * scale).cast(gradient.dtype())).collect()
    }

    fn num_terms(&self) -> usize {
        if self.z_loss_multiplier == 0.0 { 1 } else { 2 }
    }

    fn terms<'b>(
        &self,
        parameters: &[Tensor<'b>],
        hidden: Tensor<'b>,
        targets: Tensor<'b>,
        segmentation: Tensor<'b>,
    ) -> Vec<Tensor<'b>> {
        let logits = (self.head)(parameters, hidden);
        let loss_of = if self.in_f32 { token_loss } else { narrow_token_loss };
        let loss = loss_of(logits, targets, segmentation, self.z_loss_multiplier);
        [Some(loss.total), loss.z_loss].into_iter().flatten().collect()
    }

    /// The parameters, gathered along `gathered`, and the token arrays cut into tiles.
    fn split<'b>(&self, arguments: &[Tensor<'b>]) -> (Vec<Tensor<'b>>, Tile<Tensor<'b>>) {
        let (parameters, tokens) = arguments.split_at(arguments.len() - 3);
        let parameters = self.gather(parameters);
        let tile = Tile {
            hidden: self.cut(tokens[0]),
            targets: self.cut(tokens[1]),
            segmentation: self.cut(tokens[2]),
        };
        (parameters, tile)
    }

    /// The parameters, gathered along `gathered`.
    pub(super) fn gather<'b>(&self, parameters: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        let gather = |(parameter, logical_axes): (&Tensor<'b>, &Vec<Option<LogicalAxis>>)| {
            if !logical_axes.iter().flatten().any(|name| self.gathered.contains(name)) {
                return *parameter;
            }
            let kept: Vec<Option<LogicalAxis>> =
                logical_axes.iter().map(|name| name.filter(|name| !self.gathered.contains(name))).collect();
            parameter.constrain(&kept)
        };
        parameters.iter().zip(self.logical_axes).map(gather).collect()
    }

    /// Sums of the parameters' gradients before the first tile.
    pub(super) fn zeros<'b>(&self, region: Region<'b>, parameters: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        let pairs = parameters.iter().zip(self.logical_axes);
        pairs
            .map(|(parameter, logical_axes)| {
                region.full(parameter.dtype(), &parameter.axes(), 0.0).constrain(logical_axes)
            })
            .collect()
    }

    /// The gradients with the placement of their parameters.
    pub(super) fn placed<'b>(&self, gradients: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        let pairs = gradients.iter().zip(self.logical_axes);
        pairs.map(|(gradient, logical_axes)| gradient.constrain(logical_axes)).collect()
    }

    pub(super) fn cut<'b>(&self, tensor: Tensor<'b>) -> Tensor<'b> {
        cut(tensor, self.tiles)
    }
}

/// Cuts `[batch, position, …]` into `[tile, batch, position, …]`. Adjacent positions go to different tiles, so that each
/// tile takes an equal share from every device, however positions are split, and no data moves between devices.
fn cut<'b>(tensor: Tensor<'b>, tiles: usize) -> Tensor<'b> {
    let length = tensor.axis(POSITION).size;
    let cut = tensor.split(POSITION, &[axis(POSITION, length / tiles), axis(TILE, tiles)]);
    let rest: Vec<Axis> = cut.axes().iter().filter(|axis| axis.name != TILE).copied().collect();
    cut.broadcast(&[&[axis(TILE, tiles)], rest.as_slice()].concat())
}

/// Restores the axes of `whole` from `[tile, batch, position, …]`.
pub(super) fn joined<'b>(of_tiles: Tensor<'b>, whole: Tensor<'b>) -> Tensor<'b> {
    let mut order: Vec<&'static str> = whole.axes().iter().map(|axis| axis.name).collect();
    let position = order.iter().position(|name| *name == POSITION).unwrap_or_default();
    order.insert(position + 1, TILE);
    of_tiles.order(&order).merge(&[POSITION, TILE], POSITION)
}

pub(super) fn added<'b>(sums: &[Tensor<'b>], terms: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
    sums.iter().zip(terms).map(|(sum, term)| *sum + *term).collect()
}
