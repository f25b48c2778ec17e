//! Operands and results of attention: matrices with strides.

use std::marker::PhantomData;

use crate::Element;

/// Sizes of the queries. Keys and values have the same sizes with a `group` of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub batch: usize,
    pub length: usize,
    pub kv_heads: usize,
    /// Queries that share a key, per position.
    pub group: usize,
    pub head_dim: usize,
}

impl Shape {
    /// The shape of keys and values.
    fn keys(self) -> Self {
        Self { group: 1, ..self }
    }

    /// The shape of arrays with one number for each query.
    fn rows(self) -> Self {
        Self { head_dim: 1, ..self }
    }
}

/// The distances between neighbors along each axis, in elements. Neighbors along `head_dim` are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    pub batch: usize,
    pub position: usize,
    pub kv_head: usize,
    /// Unused by keys and values.
    pub group: usize,
}

impl Strides {
    /// The strides of contiguous arrays `[batch, position, kv_heads, group, head_dim]`.
    pub fn positions_first(shape: Shape) -> Self {
        let group = shape.head_dim;
        let kv_head = group * shape.group;
        let position = kv_head * shape.kv_heads;
        Self { batch: position * shape.length, position, kv_head, group }
    }

    /// The strides of contiguous arrays `[batch, kv_heads, position, group, head_dim]`.
    pub fn heads_first(shape: Shape) -> Self {
        let group = shape.head_dim;
        let position = group * shape.group;
        let kv_head = position * shape.length;
        Self { batch: kv_head * shape.kv_heads, position, kv_head, group }
    }

    /// Sizes and strides of the axes with more than one element.
    fn pairs(self, shape: Shape) -> Vec<(usize, usize)> {
        let all = [
            (shape.batch, self.batch),
            (shape.length, self.position),
            (shape.kv_heads, self.kv_head),
            (shape.group, self.group),
        ];
        all.into_iter().filter(|(size, _)| *size != 1).collect()
    }

    /// The largest index plus one.
    fn extent(self, shape: Shape) -> usize {
        let steps = self.pairs(shape).into_iter().map(|(size, stride)| (size - 1) * stride);
        steps.sum::<usize>() + shape.head_dim
    }

    /// Whether all elements have different indices.
    fn are_apart(self, shape: Shape) -> bool {
        let mut pairs = self.pairs(shape);
        pairs.sort_by_key(|(_, stride)| *stride);
        let mut extent = shape.head_dim;
        pairs.into_iter().all(|(size, stride)| {
            let is_apart = stride >= extent;
            extent += (size - 1) * stride;
            is_apart
        })
    }

    fn start(self, row: Row) -> usize {
        row.batch * self.batch
            + row.position * self.position
            + row.kv_head * self.kv_head
            + row.group * self.group
    }
}

/// The indices of a query, or of a key if `group` is 0.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub batch: usize,
    pub position: usize,
    pub kv_head: usize,
    pub group: usize,
}

/// An array that a kernel reads.
#[derive(Clone, Copy)]
pub struct Operand<'a, T> {
    data: &'a [T],
    strides: Strides,
    head_dim: usize,
}

impl<'a, T> Operand<'a, T> {
    /// An array of queries, or of results of their shape.
    pub fn queries(data: &'a [T], strides: Strides, shape: Shape) -> Self {
        assert!(strides.extent(shape) <= data.len(), "rows end within the data");
        Self { data, strides, head_dim: shape.head_dim }
    }

    /// An array of keys or of values.
    pub fn keys(data: &'a [T], strides: Strides, shape: Shape) -> Self {
        Self::queries(data, strides, shape.keys())
    }

    /// An array with one number for each query.
    pub fn rows(data: &'a [T], strides: Strides, shape: Shape) -> Self {
        Self::queries(data, strides, shape.rows())
    }

    #[inline(always)]
    pub(super) fn row(&self, row: Row) -> &'a [T] {
        &self.data[self.strides.start(row)..][..self.head_dim]
    }
}

/// An array that a kernel writes from several threads.
pub struct Outcome<'a, T> {
    data: *mut T,
    strides: Strides,
    shape: Shape,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: the value has exclusive access to the data, and each thread writes rows of its own.
unsafe impl<T: Send> Sync for Outcome<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Outcome<'_, T> {}

impl<'a, T> Outcome<'a, T> {
    /// An array of queries, or of results of their shape.
    pub fn queries(data: &'a mut [T], strides: Strides, shape: Shape) -> Self {
        assert!(strides.extent(shape) <= data.len(), "rows end within the data");
        assert!(strides.are_apart(shape), "rows do not overlap");
        Self { data: data.as_mut_ptr(), strides, shape, lifetime: PhantomData }
    }

    /// An array of keys or of values.
    pub fn keys(data: &'a mut [T], strides: Strides, shape: Shape) -> Self {
        Self::queries(data, strides, shape.keys())
    }

    /// An array with one number for each query.
    pub fn rows(data: &'a mut [T], strides: Strides, shape: Shape) -> Self {
        Self::queries(data, strides, shape.rows())
    }

    /// Writes a row, rounded to the element type. Reads the first `head_dim` numbers of `from`.
    ///
    /// # Safety
    /// No other thread accesses the same row meanwhile.
    #[inline(always)]
    pub(super) unsafe fn write(&self, row: Row, from: &[f32])
    where
        T: Element,
    {
        let Shape { batch, length, kv_heads, group, head_dim } = self.shape;
        assert!(
            row.batch < batch && row.position < length && row.kv_head < kv_heads && row.group < group,
            "the row exists"
        );
        let start = self.strides.start(row);
        // SAFETY: all rows end within the data and do not overlap; the caller promises that no other thread accesses
        // this one.
        let to = unsafe { std::slice::from_raw_parts_mut(self.data.add(start), head_dim) };
        for (to, from) in to.iter_mut().zip(&from[..head_dim]) {
            *to = T::from_f32(*from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_say_whether_rows_overlap() {
        let shape = Shape { batch: 2, length: 5, kv_heads: 3, group: 2, head_dim: 4 };
        for strides in [Strides::positions_first(shape), Strides::heads_first(shape)] {
            assert!(strides.are_apart(shape));
            assert_eq!(strides.extent(shape), 2 * 5 * 3 * 2 * 4);
            assert!(!Strides { group: 3, ..strides }.are_apart(shape));
            assert!(!Strides { batch: strides.batch - 1, ..strides }.are_apart(shape));
            assert!(Strides { batch: strides.batch + 1, ..strides }.are_apart(shape));
            let keys = shape.keys();
            assert!(Strides { group: 0, ..strides }.are_apart(keys));
        }
    }
}
