//! Valid requests of every route, and damaged ones made from them.

use serde_json::{Map, Value, json};

/// SplitMix64: the same number gives the same damage, in any run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }

    fn is(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
}

/// Requests that the server accepts, and values at the edges of types and bounds, among them texts with a meaning for
/// templates, grammars and parsers.
const REQUESTS: &str = include_str!("requests.json");

/// The material of damaged requests.
pub struct Corpus {
    valid: Vec<(String, Value)>,
    edges: Vec<Value>,
    names: Vec<String>,
}

impl Default for Corpus {
    fn default() -> Self {
        let mut requests: Value = serde_json::from_str(REQUESTS).expect("the file is JSON");
        let mut list = |name: &str| match requests[name].take() {
            Value::Array(list) => list,
            _ => Vec::new(),
        };
        let valid: Vec<(String, Value)> = list("valid")
            .into_iter()
            .map(|mut request| {
                (request["route"].as_str().unwrap_or_default().to_owned(), request["body"].take())
            })
            .collect();
        let edges = list("edges");
        let mut names = Vec::new();
        valid.iter().for_each(|(_, body)| collect_names(body, &mut names));
        names.extend(
            ["best_of", "background", "previous_response_id", "suffix", "length_penalty", "documents"]
                .map(str::to_owned),
        );
        names.sort_unstable();
        names.dedup();
        Self { valid, edges, names }
    }
}

fn collect_names(value: &Value, names: &mut Vec<String>) {
    match value {
        Value::Object(object) => object.iter().for_each(|(name, value)| {
            names.push(name.clone());
            collect_names(value, names);
        }),
        Value::Array(list) => list.iter().for_each(|value| collect_names(value, names)),
        _ => {}
    }
}

impl Corpus {
    /// A request with one to four damages, or rarely with none.
    pub fn damaged(&self, random: &mut Random) -> (&str, Vec<u8>) {
        let (route, body) = random.of(&self.valid);
        // A body of another route has many fields that the route knows, in other forms.
        let route = if random.is(20) { &random.of(&self.valid).0 } else { route };
        let mut body = body.clone();
        for _ in 0..random.below(5) {
            self.damage(&mut body, random);
        }
        let mut bytes = body.to_string().into_bytes();
        if random.is(6) {
            for _ in 0..=random.below(3) {
                damage_bytes(&mut bytes, random);
            }
        }
        (route.as_str(), bytes)
    }

    fn damage(&self, body: &mut Value, random: &mut Random) {
        let mut place = random.below(count(body));
        let Some(value) = nth(body, &mut place) else { return };
        match random.below(9) {
            0..3 => *value = random.of(&self.edges).clone(),
            // A piece of another request.
            3 => {
                let mut other = random.of(&self.valid).1.clone();
                let mut place = random.below(count(&other));
                *value = nth(&mut other, &mut place).map(Value::take).unwrap_or_default();
            }
            4 => match value {
                Value::Object(object) => {
                    object.insert(random.of(&self.names).clone(), random.of(&self.edges).clone());
                }
                Value::Array(list) => list.push(random.of(&self.edges).clone()),
                other => *other = json!([other.take()]),
            },
            5 => match value {
                Value::Object(object) => {
                    let names: Vec<String> = object.keys().cloned().collect();
                    if !names.is_empty() {
                        object.remove(random.of(&names));
                    }
                }
                Value::Array(list) if !list.is_empty() => {
                    list.remove(random.below(list.len()));
                }
                other => *other = Value::Null,
            },
            6 => match value {
                Value::Array(list) if list.len() < 100 => {
                    let times = 1 + random.below(40);
                    *list = std::iter::repeat_n(list.clone(), times).flatten().collect();
                }
                Value::String(text) if text.len() < 1000 => *text = text.repeat(1 + random.below(400)),
                Value::Number(number) => {
                    let factor = *random.of(&[-1.0, 0.5, 10.0, 1e9, 1e300]);
                    *value = json!(number.as_f64().unwrap_or_default() * factor);
                }
                other => *other = json!({ "a": other.take() }),
            },
            // Deeper than any reader may recurse.
            7 => {
                for _ in 0..random.below(150) {
                    *value = json!([value.take()]);
                }
            }
            _ => {
                if let Value::Object(object) = value {
                    let renamed: Map<String, Value> = std::mem::take(object)
                        .into_iter()
                        .map(|(name, value)| {
                            (if random.is(3) { random.of(&self.names).clone() } else { name }, value)
                        })
                        .collect();
                    *object = renamed;
                } else {
                    *value = random.of(&self.edges).clone();
                }
            }
        }
    }
}

fn count(value: &Value) -> usize {
    1 + match value {
        Value::Object(object) => object.values().map(count).sum(),
        Value::Array(list) => list.iter().map(count).sum(),
        _ => 0,
    }
}

/// The value at a place in the order of a walk.
fn nth<'a>(value: &'a mut Value, place: &mut usize) -> Option<&'a mut Value> {
    if *place == 0 {
        return Some(value);
    }
    *place -= 1;
    match value {
        Value::Object(object) => object.values_mut().find_map(|value| nth(value, place)),
        Value::Array(list) => list.iter_mut().find_map(|value| nth(value, place)),
        _ => None,
    }
}

fn damage_bytes(bytes: &mut Vec<u8>, random: &mut Random) {
    let place = random.below(bytes.len());
    match random.below(5) {
        0 => bytes.truncate(place),
        1 if !bytes.is_empty() => bytes[place] ^= 1 << random.below(8),
        2 => bytes.insert(place, random.next() as u8),
        3 => {
            let pieces: [&[u8]; 10] =
                [b"\\ud800", b"\xff\xfe", b"1e999", b"\"", b"{", b"[", b"\\", b"\0", b",,", b"null"];
            let piece = *random.of(&pieces);
            bytes.splice(place..place, piece.iter().copied());
        }
        _ => {
            let end = (place + random.below(20)).min(bytes.len());
            bytes.drain(place..end);
        }
    }
}
