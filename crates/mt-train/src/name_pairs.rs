//! Pairs of parameters that a mapping of regular expressions selects.

use fancy_regex::{Expander, Regex};
use serde_json::{Map, Value};

use crate::TrainError;

/// The names of the parameters of a model.
pub(crate) struct Names<'a> {
    /// The model, such as `teacher`.
    pub of: &'static str,
    pub names: &'a [String],
}

impl Names<'_> {
    fn find(&self, name: &str) -> Result<usize, String> {
        self.names.iter().position(|known| known == name).ok_or_else(|| self.no_parameter(name))
    }

    fn no_parameter(&self, name: &str) -> String {
        let near = mt_config::nearest_names(name, self.names.iter().map(String::as_str));
        let near: Vec<String> = near.iter().map(|name| format!("`{name}`")).collect();
        let hint = match near.is_empty() {
            true => format!("its parameters are such as `{}`", self.names.last().map_or("", String::as_str)),
            false => format!("did you mean {}?", near.join(" or ")),
        };
        format!("the {} has no parameter `{name}`\nhint: {hint}", self.of)
    }
}

/// The indices of the pairs of parameters that `mapping`, the value of `key`, selects. A pattern matches whole names of `from`.
/// Its target is a name of `to`, or the pattern itself for parameters of the same name, and may refer to the groups of the
/// pattern, as in `layers_\1`.
///
/// # Errors
/// A pattern is no regular expression or matches nothing, or a target does not exist.
pub(crate) fn name_pairs(
    key: &'static str,
    mapping: &Map<String, Value>,
    from: &Names<'_>,
    to: &Names<'_>,
) -> Result<Vec<(usize, usize)>, TrainError> {
    let wrong = |problem: String| TrainError::StudentWeights { key, problem };
    let mut pairs = Vec::new();
    for (pattern, target) in mapping {
        let target = target.as_str().ok_or_else(|| {
            let hint = "write the name of a parameter of the student, such as `{\"decoder/decoder_norm/scale\": \
                        \"decoder/decoder_norm/scale\"}`";
            wrong(format!("`{pattern}` is mapped to `{target}`, which is no name\nhint: {hint}"))
        })?;
        let no_expression =
            |error: String| wrong(format!("`{pattern}` is no regular expression: {error}\nhint: correct it"));
        let expression =
            Regex::new(&format!("^(?:{pattern})$")).map_err(|error| no_expression(error.to_string()))?;
        let before = pairs.len();
        for (index, name) in from.names.iter().enumerate() {
            let Some(groups) = expression.captures(name).map_err(|error| no_expression(error.to_string()))?
            else {
                continue;
            };
            let target = match target == pattern {
                true => name.clone(),
                false => Expander::python().expansion(target, &groups),
            };
            pairs.push((index, to.find(&target).map_err(wrong)?));
        }
        if pairs.len() == before {
            return Err(wrong(from.no_parameter(pattern)));
        }
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(mapping: Value, expected: Result<&[(usize, usize)], &str>) {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let [from, to] = [
            names(&["layers_0/wi/kernel", "layers_1/wi/kernel", "norm/scale"]),
            names(&["norm/scale", "layers_1/wi/kernel", "layers_0/wi/kernel", "layers_1/wo/kernel"]),
        ];
        let (from, to) = (Names { of: "teacher", names: &from }, Names { of: "student", names: &to });
        let made = name_pairs("distill_weights_copy_map", mapping.as_object().unwrap(), &from, &to);
        match (made, expected) {
            (Ok(made), Ok(expected)) => assert_eq!(made, expected, "{mapping}"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (made, _) => panic!("{mapping} gives {made:?}"),
        }
    }

    #[test]
    fn patterns_match_whole_names_and_targets_refer_to_their_groups() {
        check(json!({"norm/scale": "norm/scale"}), Ok(&[(2, 0)]));
        check(json!({r"layers_(\d)/wi/kernel": r"layers_\1/wi/kernel"}), Ok(&[(0, 2), (1, 1)]));
        check(json!({r"layers_\d/.*": r"layers_\d/.*"}), Ok(&[(0, 2), (1, 1)]));
        check(json!({"layers_0/wi/kernel": "layers_1/wo/kernel"}), Ok(&[(0, 3)]));
        check(json!({"scale": "norm/scale"}), Err("the teacher has no parameter `scale`"));
        check(json!({"norm/scale": "norm/scal"}), Err("the student has no parameter `norm/scal`"));
        check(json!({"norm/scale": "norm/scal"}), Err("did you mean `norm/scale`"));
        check(json!({"norm(": "norm/scale"}), Err("`norm(` is no regular expression"));
        check(json!({"norm/scale": 3}), Err("`norm/scale` is mapped to `3`, which is no name"));
    }
}
