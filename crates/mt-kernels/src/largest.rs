//! The argmax of rows.

use std::sync::{Mutex, PoisonError};

use crate::{
    Element, Team,
    block::{BLOCK, largest_of},
    simd::{Instructions, Simd, Work, with_simd},
};

/// Writes the index of each row's largest element: the first of equal ones. NaN is ignored; a row of NaN gets any valid
/// index.
///
/// # Panics
/// Rows are empty, or the elements do not divide into one row for each index.
pub fn largest<E: Element>(team: &dyn Team, instructions: Instructions, elements: &[E], indices: &mut [i32]) {
    let len = elements.len() / indices.len().max(1);
    assert!(len * indices.len() == elements.len() && (len != 0 || indices.is_empty()), "rows of one length");
    let indices: Vec<_> = indices.iter_mut().map(Mutex::new).collect();
    team.for_each(indices.len(), &|row| {
        let row_elements = &elements[row * len..][..len];
        let mut index = indices[row].lock().unwrap_or_else(PoisonError::into_inner);
        with_simd!(instructions, simd => simd.run(Largest { simd, row: row_elements, index: &mut index }));
    });
}

struct Largest<'a, 'b, S, E> {
    simd: S,
    row: &'a [E],
    index: &'b mut i32,
}

impl<S: Simd, E: Element> Work for Largest<'_, '_, S, E> {
    // Loops call no closures, because closures would not be compiled for these instructions.
    #[inline(always)]
    fn run(self) {
        let Self { simd, row, index } = self;
        let largest = largest_of(simd, row);
        let mut start = 0;
        for block in row.as_chunks::<BLOCK>().0 {
            let mut is_here = false;
            for element in block {
                is_here |= element.to_f32() == largest;
            }
            if is_here {
                break;
            }
            start += BLOCK;
        }
        let mut found = start;
        for element in &row[start..] {
            if element.to_f32() == largest {
                break;
            }
            found += 1;
        }
        *index = found.min(row.len() - 1) as i32;
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ScopedThreads;

    fn check<E: Element>(instructions: Instructions, row: &[f32], index: usize) {
        let row: Vec<E> = row.iter().map(|number| E::from_f32(*number)).collect();
        // The second row is the first one reversed.
        let back: Vec<E> = row.iter().rev().copied().collect();
        let mut indices = [-1; 2];
        largest(&ScopedThreads(2), instructions, &[&*row, &back].concat(), &mut indices);
        let last = row.iter().rposition(|element| element.to_f32() == row[index].to_f32()).unwrap();
        assert_eq!(
            indices,
            [index as i32, (row.len() - 1 - last) as i32],
            "{instructions:?}, {} elements",
            row.len()
        );
    }

    #[test]
    fn the_first_largest_element_is_found_wherever_it_is() {
        for instructions in Instructions::available() {
            for len in [1, 5, 63, 64, 65, 128, 133, 1000] {
                for index in [0, len / 3, len / 2, len - 1] {
                    let mut row = vec![-3.0; len];
                    row[index] = -1.5;
                    check::<f32>(instructions, &row, index);
                    check::<bf16>(instructions, &row, index);
                    row[index..].fill(-1.5);
                    check::<f32>(instructions, &row, index);
                }
                check::<f32>(instructions, &vec![f32::NEG_INFINITY; len], 0);
            }
        }
    }

    #[test]
    fn what_is_no_number_gives_an_index_of_the_row() {
        for instructions in Instructions::available() {
            let mut index = [-1];
            for row in [vec![f32::NAN; 70], [vec![1.0; 66], vec![f32::NAN; 3]].concat()] {
                largest(&ScopedThreads(1), instructions, &row, &mut index);
                assert!((0..row.len() as i32).contains(&index[0]), "{index:?}");
            }
        }
    }
}
