//! The processor features that kernels may use.

use std::fmt;

/// A group of instructions that some processors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// AVX2 with fused multiply-add.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// Dot products of `bf16` in AVX-512 registers.
    Avx512Bf16,
    /// AMX tiles and their products of `bf16`, which the system permits.
    AmxBf16,
    /// AMX tiles and their products of `bf16` and of `i8`.
    AmxInt8,
}

impl Feature {
    /// All features, each after the one that it builds on.
    pub const ALL: [Self; 5] = [Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::AmxBf16, Self::AmxInt8];

    /// The name in [`Features::named`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::AmxBf16 => "amx_bf16",
            Self::AmxInt8 => "amx_int8",
        }
    }

    /// The feature without which kernels do not use this one.
    const fn builds_on(self) -> Option<Self> {
        match self {
            Self::Avx2 => None,
            Self::Avx512 => Some(Self::Avx2),
            Self::Avx512Bf16 => Some(Self::Avx512),
            Self::AmxBf16 => Some(Self::Avx512Bf16),
            Self::AmxInt8 => Some(Self::AmxBf16),
        }
    }

    /// Whether the processor has the feature and those that it builds on.
    fn is_usable(self) -> bool {
        self.builds_on().is_none_or(Self::is_usable) && self.detect()
    }

    #[cfg(target_arch = "x86_64")]
    fn detect(self) -> bool {
        match self {
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            Self::Avx512Bf16 => is_x86_feature_detected!("avx512bf16"),
            Self::AmxBf16 => crate::amx::has_bf16(),
            Self::AmxInt8 => crate::amx::has_int8(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect(self) -> bool {
        false
    }
}

/// A set of features that this processor has. A value proves that the processor has them, and contains the feature that
/// each one builds on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    has: [bool; Feature::ALL.len()],
}

impl Features {
    /// The list without any feature.
    pub const NONE: &'static str = "none";

    /// All features of this processor.
    pub fn detect() -> Self {
        let mut all = Self { has: [false; Feature::ALL.len()] };
        for feature in Feature::ALL {
            all.has[feature as usize] = feature.is_usable();
        }
        all
    }

    /// The features of this processor that a comma-separated list names, or none for [`Self::NONE`]. A name includes the
    /// feature that it builds on.
    ///
    /// # Errors
    /// A word of the list is not the name of a feature.
    pub fn named(list: &str) -> Result<Self, UnknownFeature> {
        // Other features are not detected, because detecting tiles changes what the process is permitted to use.
        let mut named = Self { has: [false; Feature::ALL.len()] };
        if list.trim() == Self::NONE {
            return Ok(named);
        }
        for word in list.split(',').map(str::trim) {
            let feature = Feature::ALL.into_iter().find(|feature| feature.name() == word);
            let mut feature = Some(feature.ok_or_else(|| UnknownFeature(word.to_owned()))?);
            while let Some(one) = feature {
                named.has[one as usize] = one.is_usable();
                feature = one.builds_on();
            }
        }
        Ok(named)
    }

    pub fn contains(self, feature: Feature) -> bool {
        self.has[feature as usize]
    }

    /// The features, each after the one that it builds on.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.into_iter().filter(move |feature| self.contains(*feature))
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.iter().map(Feature::name).collect();
        f.write_str(if names.is_empty() { Self::NONE } else { "" })?;
        f.write_str(&names.join(","))
    }
}

/// A word that is not the name of a feature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownFeature(pub String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_only_take_features_away() {
        let detected = Features::detect();
        let check = |list: &str, expected: &[Feature]| {
            let features = Features::named(list).unwrap();
            for feature in Feature::ALL {
                let is_expected = expected.contains(&feature) && detected.contains(feature);
                assert_eq!(features.contains(feature), is_expected, "{feature:?} of {list:?}");
            }
        };
        check("none", &[]);
        check("avx2", &[Feature::Avx2]);
        check(" avx2 , avx512 ", &[Feature::Avx2, Feature::Avx512]);
        check("avx512_bf16", &Feature::ALL[..3]);
        check("amx_int8", &Feature::ALL);
        assert_eq!(Features::named(&detected.to_string()), Ok(detected));
        for (list, word) in
            [("avx9", "avx9"), ("avx2,", ""), ("", ""), ("avx2,none", "none"), ("AVX2", "AVX2")]
        {
            assert_eq!(Features::named(list), Err(UnknownFeature(word.into())), "{list:?}");
        }
    }

    #[test]
    fn features_come_with_what_they_build_on() {
        let detected = Features::detect();
        for feature in detected.iter() {
            assert!(feature.builds_on().is_none_or(|base| detected.contains(base)), "{feature:?}");
        }
    }
}
