//! Quantization to the types of GGUF.

use half::f16;

/// The number of numbers that share a scale.
const BLOCK: usize = 32;

/// Numbers as `q8_0`: for each 32 of them a scale in `f16` and 32 signed bytes. The scale makes the largest magnitude 127.
/// Bytes are computed with the scale before it is rounded, as by llama.cpp.
///
/// # Panics
/// The numbers are not whole blocks.
pub fn encode_q8_0(numbers: &[f32]) -> Vec<u8> {
    assert_eq!(numbers.len() % BLOCK, 0, "numbers are encoded in whole blocks");
    let mut bytes = Vec::with_capacity(numbers.len() / BLOCK * (BLOCK + 2));
    for block in numbers.chunks_exact(BLOCK) {
        let largest = block.iter().fold(0.0_f32, |largest, number| largest.max(number.abs()));
        let scale = largest / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        bytes.extend(f16::from_f32(scale).to_le_bytes());
        // `round` moves halves away from zero.
        bytes.extend(block.iter().map(|number| ((number * inverse).round() as i8) as u8));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_magnitude_becomes_127() {
        let mut numbers = [0.0_f32; 64];
        numbers[3] = -2.54;
        numbers[4] = 1.27;
        let bytes = encode_q8_0(&numbers);
        assert_eq!(bytes.len(), 68);
        assert_eq!(f16::from_le_bytes([bytes[0], bytes[1]]), f16::from_f32(0.02));
        assert_eq!((bytes[2 + 3] as i8, bytes[2 + 4] as i8), (-127, 64));
        assert!(bytes[34..].iter().all(|byte| *byte == 0), "a block of zeros has the scale 0");
    }
}
