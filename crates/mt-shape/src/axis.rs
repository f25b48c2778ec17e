//! Named tensor axes.

use std::fmt;

/// A tensor axis: a name and a size. Axes are named once, in a model's configuration.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Axis {
    /// The name by which operations contract, reduce and broadcast.
    pub name: &'static str,
    /// The number of elements along the axis.
    pub size: usize,
}

/// Creates an [`Axis`].
pub const fn axis(name: &'static str, size: usize) -> Axis {
    Axis { name, size }
}

impl Axis {
    /// The same axis with another size.
    pub const fn with_size(self, size: usize) -> Self {
        Self { name: self.name, size }
    }

    /// The same size under another name.
    pub const fn renamed(self, name: &'static str) -> Self {
        Self { name, size: self.size }
    }
}

impl fmt::Debug for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.size)
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
