//! The element types of attention's buffers.

use half::bf16;

use crate::{
    Arithmetic,
    attention::Attend,
    ffi::{Data, DataMut},
};

/// An element type with its buffers.
pub(crate) trait BufferElement: Attend {
    /// The arithmetic of its products in attention.
    const ARITHMETIC: Arithmetic;

    fn of(data: Data<'_>) -> Option<&[Self]>;
    fn of_mut(data: DataMut<'_>) -> Option<&mut [Self]>;
}

impl BufferElement for f32 {
    const ARITHMETIC: Arithmetic = Arithmetic::F32;

    fn of(data: Data<'_>) -> Option<&[Self]> {
        if let Data::F32(elements) = data { Some(elements) } else { None }
    }

    fn of_mut(data: DataMut<'_>) -> Option<&mut [Self]> {
        if let DataMut::F32(elements) = data { Some(elements) } else { None }
    }
}

impl BufferElement for bf16 {
    const ARITHMETIC: Arithmetic = Arithmetic::Bf16;

    fn of(data: Data<'_>) -> Option<&[Self]> {
        if let Data::Bf16(elements) = data { Some(elements) } else { None }
    }

    fn of_mut(data: DataMut<'_>) -> Option<&mut [Self]> {
        if let DataMut::Bf16(elements) = data { Some(elements) } else { None }
    }
}
