//! Losses of tokens whose logits are never held all at once.

use mt_derive::Tree;
use mt_shape::{Axis, DType, axis};
use mt_trace::{Region, ScanOptions, Tensor};

use super::{TokenLoss, narrow_token_loss, token_loss, token_weights};
use crate::axes::{BATCH, POSITION};

const TILE: &str = "tile";

/// A function from its parameters and hidden states to logits.
type Head<'a> = dyn for<'b> Fn(&[Tensor<'b>], Tensor<'b>) -> Tensor<'b> + 'a;

/// The last part of a model, taken with the loss in tiles of tokens.
///
/// The gradients of hidden states and parameters are computed with the loss, tile by tile, and scaled when its
/// cotangent is known. To compute logits again in the backward pass would cost a fourth product beside the three, and
/// save nothing: the backward pass begins with these gradients, so they are there when memory is at its peak anyway.
#[derive(Clone, Copy)]
pub struct TiledHead<'a> {
    /// How many tiles there are; it divides the number of positions.
    pub tiles: usize,
    pub z_loss_multiplier: f64,
    /// Whether each token's loss is computed in `f32` rather than in the type of its logits.
    pub in_f32: bool,
    /// Traced several times; captures no tensors.
    pub head: &'a Head<'a>,
    /// The logical axes of each of the head's parameters, by which their gradients are placed.
    pub logical_axes: &'a [Vec<Option<&'static str>>],
    /// Logical axes that are not split while tiles are computed, so that they are gathered once and not for each.
    pub gathered: &'a [&'static str],
}

/// What a scan over tiles slices.
#[derive(Tree)]
struct Tile<L> {
    hidden: L,
    targets: L,
    segmentation: L,
}

#[derive(Tree)]
struct Differentiated<L> {
    hidden: L,
    parameters: Vec<L>,
}

impl TiledHead<'_> {
    /// The loss of tokens, of which those with segment id 0 do not count.
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

    /// The sums over tokens: of all terms and, if it counts, of the z-loss alone.
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

    /// The same sums, and as residuals the gradients of the first: of all parameters, then of the hidden states.
    fn forward<'b>(
        &self,
        region: Region<'b>,
        arguments: &[Tensor<'b>],
    ) -> (Vec<Tensor<'b>>, Vec<Tensor<'b>>) {
        let (parameters, tiles) = self.split(arguments);
        let num_terms = self.num_terms();
        let mut carry = vec![region.full(DType::F32, &[], 0.0); num_terms];
        for (parameter, logical_axes) in parameters.iter().zip(self.logical_axes) {
            carry.push(region.full(parameter.dtype(), &parameter.axes(), 0.0).constrain(logical_axes));
        }
        let options = ScanOptions::over(axis(TILE, self.tiles));
        let (mut sums, of_hidden) = region.scan_lists(options, &carry, &tiles, |region, carry, tile| {
            let differentiated = Differentiated { hidden: tile.hidden, parameters: parameters.clone() };
            let (_, terms, gradients) = region.value_and_grad_list(&differentiated, |_, given| {
                let terms = self.terms(&given.parameters, given.hidden, tile.targets, tile.segmentation);
                (terms[0], terms)
            });
            let placed = gradients.parameters.iter().zip(self.logical_axes);
            let of_parameters: Vec<Tensor<'_>> =
                placed.map(|(gradient, logical_axes)| gradient.constrain(logical_axes)).collect();
            (added(&carry, &[terms, of_parameters].concat()), vec![gradients.hidden])
        });
        let mut gradients = sums.split_off(num_terms);
        // Back from `[tile, batch, position, …]`.
        let hidden = arguments[parameters.len()];
        let of_hidden = of_hidden[0];
        let mut order: Vec<&'static str> = hidden.axes().iter().map(|axis| axis.name).collect();
        let position = order.iter().position(|name| *name == POSITION).unwrap_or_default();
        order.insert(position + 1, TILE);
        gradients.push(of_hidden.order(&order).merge(&[POSITION, TILE], POSITION));
        (sums, gradients)
    }

    fn backward<'b>(&self, gradients: &[Tensor<'b>], cotangents: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        // The sum of the z-loss alone is only reported: `token_loss` stops its gradient.
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

    /// The parameters, gathered as far as asked, and the rest cut into tiles.
    fn split<'b>(&self, arguments: &[Tensor<'b>]) -> (Vec<Tensor<'b>>, Tile<Tensor<'b>>) {
        let (parameters, tokens) = arguments.split_at(arguments.len() - 3);
        let gather = |(parameter, logical_axes): (&Tensor<'b>, &Vec<Option<&'static str>>)| {
            if !logical_axes.iter().flatten().any(|name| self.gathered.contains(name)) {
                return *parameter;
            }
            let kept: Vec<Option<&str>> =
                logical_axes.iter().map(|name| name.filter(|name| !self.gathered.contains(name))).collect();
            parameter.constrain(&kept)
        };
        let parameters = parameters.iter().zip(self.logical_axes).map(gather).collect();
        let tile = Tile {
            hidden: self.cut(tokens[0]),
            targets: self.cut(tokens[1]),
            segmentation: self.cut(tokens[2]),
        };
        (parameters, tile)
    }

    /// `[batch, position, …]` as `[tile, batch, position, …]`. Neighbouring positions go to different tiles, so that
    /// each tile has an equal part of every device's, however positions are split, and nothing moves between them.
    fn cut<'b>(&self, tensor: Tensor<'b>) -> Tensor<'b> {
        let length = tensor.axis(POSITION).size;
        let cut = tensor.split(POSITION, &[axis(POSITION, length / self.tiles), axis(TILE, self.tiles)]);
        let rest: Vec<Axis> = cut.axes().iter().filter(|axis| axis.name != TILE).copied().collect();
        cut.broadcast(&[&[axis(TILE, self.tiles)], rest.as_slice()].concat())
    }
}

fn added<'b>(sums: &[Tensor<'b>], terms: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
    sums.iter().zip(terms).map(|(sum, term)| *sum + *term).collect()
}
