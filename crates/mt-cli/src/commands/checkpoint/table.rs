//! Tables of tensors, and human-readable numbers.

use std::cmp::Ordering;

/// The target width of a line in characters.
const COLUMNS: usize = 100;
/// The gap between two columns in characters.
const GAP: usize = 2;

/// The alignment of a column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Formats rows with the same number of cells as aligned lines. The first column holds names. A name that would make
/// its line too long gets a line of its own, so that it does not widen the column.
pub fn lines(align: &[Align], rows: &[Vec<String>]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| length(&row[column])).max().unwrap_or_default();
    let widths: Vec<usize> = (0..align.len()).map(width).collect();
    let rest: usize = widths.iter().skip(1).map(|width| width + GAP).sum();
    let names = widths.first().copied().unwrap_or_default().min(COLUMNS.saturating_sub(rest));
    let mut lines = Vec::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = if column == 0 { names } else { widths[column] };
            if column > 0 {
                line.push_str(&" ".repeat(GAP));
            }
            let padding = " ".repeat(width.saturating_sub(length(cell)));
            let cells = if align[column] == Align::Left { [cell, &padding] } else { [&padding, cell] };
            line.extend(cells.map(String::as_str));
            if column == 0 && length(cell) > width {
                lines.push(std::mem::replace(&mut line, " ".repeat(width)));
            }
        }
        lines.push(line.trim_end().to_owned());
    }
    lines
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// A size in decimal units, which are usual for files and shards.
pub fn bytes(number: u64) -> String {
    match number as f64 {
        number if number >= 999.5e6 => format!("{:.2} GB", number / 1e9),
        number if number >= 999.5e3 => format!("{:.1} MB", number / 1e6),
        number if number >= 999.5 => format!("{:.1} kB", number / 1e3),
        number => format!("{number} B"),
    }
}

/// Parses a size such as `5GB`, `500 MB`, `2GiB` or `1000000`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || "a size such as 5GB, 500MB or 2GiB is expected".to_owned();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let unit = match text[end..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024.0_f64.powi(2),
        "gib" => 1024.0_f64.powi(3),
        "tib" => 1024.0_f64.powi(4),
        _ => return Err(wrong()),
    };
    let number: f64 = text[..end].parse().map_err(|_| wrong())?;
    let bytes = number * unit;
    if (1.0..1e18).contains(&bytes) { Ok(bytes as u64) } else { Err(wrong()) }
}

/// A number of elements, shortened.
pub fn elements(number: u64) -> String {
    match number as f64 {
        number if number >= 999.5e6 => format!("{:.2}B", number / 1e9),
        number if number >= 999.5e3 => format!("{:.1}M", number / 1e6),
        number if number >= 9999.5 => format!("{:.1}K", number / 1e3),
        number => format!("{number}"),
    }
}

/// A number with its noun.
pub fn counted(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Compares names naturally: layer 2 comes before layer 10.
pub fn by_name(left: &str, right: &str) -> Ordering {
    pieces(left).cmp(&pieces(right)).then_with(|| left.cmp(right))
}

/// The numbers in a name and the texts between them. Numbers sort before texts, as digits do.
fn pieces(name: &str) -> Vec<Result<u64, &str>> {
    let is_digit = |c: char| c.is_ascii_digit();
    name.split_inclusive(|c| !is_digit(c))
        .flat_map(|piece| {
            let digits = piece.len() - piece.trim_start_matches(is_digit).len();
            [&piece[..digits], &piece[digits..]]
        })
        .filter(|piece| !piece.is_empty())
        .map(|piece| piece.parse().map_err(|_| piece))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_have_lines_of_their_own() {
        let long = "x".repeat(99);
        let row = |name: &str, size: &str| vec![name.to_owned(), size.to_owned()];
        let found = lines(&[Align::Left, Align::Right], &[row("a", "1 B"), row(&long, "10 B")]);
        assert_eq!(found, [format!("a{}1 B", " ".repeat(96)), long, format!("{}10 B", " ".repeat(96))]);
        let short = lines(&[Align::Left, Align::Right], &[row("a", "1 B"), row("abc", "10 B")]);
        assert_eq!(short, ["a     1 B", "abc  10 B"]);
    }

    #[test]
    fn sizes_are_shortened() {
        for (number, expected) in [
            (0, "0 B"),
            (999, "999 B"),
            (1_000, "1.0 kB"),
            (4_000_000, "4.0 MB"),
            (16_060_522_496, "16.06 GB"),
        ] {
            assert_eq!(bytes(number), expected);
        }
        for (number, expected) in [(48, "48"), (52_000, "52.0K"), (8_030_261_248, "8.03B")] {
            assert_eq!(elements(number), expected);
        }
    }

    #[test]
    fn sizes_are_read() {
        for (text, expected) in
            [("5GB", 5_000_000_000), ("1.5 mb", 1_500_000), ("2GiB", 2_147_483_648), ("12345", 12_345)]
        {
            assert_eq!(parse_bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "GB", "0", "5 apples", "1.2.3GB", "-1GB", "1e30"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn layers_are_in_the_order_of_their_numbers() {
        let mut names =
            ["layers.10.a", "layers.2.b", "layers.2.a", "layers", "embed", "layers.02.a", "1", "x1"];
        names.sort_by(|left, right| by_name(left, right));
        assert_eq!(
            names,
            ["1", "embed", "layers", "layers.02.a", "layers.2.a", "layers.2.b", "layers.10.a", "x1"]
        );
    }
}
