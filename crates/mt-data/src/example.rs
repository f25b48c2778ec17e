//! Records of named lists: the protobuf message `tf.train.Example`.

use std::collections::BTreeMap;

use prost::Message;

/// A record.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Example {
    #[prost(message, optional, tag = "1")]
    features: Option<Features>,
}

/// The values of a feature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Values<'a> {
    Bytes(&'a [Vec<u8>]),
    Floats(&'a [f32]),
    Integers(&'a [i64]),
    Nothing,
}

#[derive(Clone, PartialEq, Message)]
struct Features {
    #[prost(btree_map = "string, message", tag = "1")]
    feature: BTreeMap<String, Feature>,
}

#[derive(Clone, PartialEq, Message)]
struct Feature {
    #[prost(oneof = "List", tags = "1, 2, 3")]
    list: Option<List>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum List {
    #[prost(message, tag = "1")]
    Bytes(BytesList),
    #[prost(message, tag = "2")]
    Floats(FloatList),
    #[prost(message, tag = "3")]
    Integers(IntegerList),
}

#[derive(Clone, PartialEq, Message)]
struct BytesList {
    #[prost(bytes = "vec", repeated, tag = "1")]
    value: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct FloatList {
    #[prost(float, repeated, tag = "1")]
    value: Vec<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct IntegerList {
    #[prost(int64, repeated, tag = "1")]
    value: Vec<i64>,
}

impl Example {
    /// Reads a record; `None` if the bytes are another message, or none.
    pub fn read(record: &[u8]) -> Option<Self> {
        Self::decode(record).ok().filter(|example| example.features.is_some())
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        self.encode_to_vec()
    }

    pub fn set_integers(&mut self, name: &str, value: Vec<i64>) {
        self.set(name, List::Integers(IntegerList { value }));
    }

    pub fn set_bytes(&mut self, name: &str, value: Vec<Vec<u8>>) {
        self.set(name, List::Bytes(BytesList { value }));
    }

    pub fn set_floats(&mut self, name: &str, value: Vec<f32>) {
        self.set(name, List::Floats(FloatList { value }));
    }

    fn set(&mut self, name: &str, list: List) {
        let features = self.features.get_or_insert_default();
        features.feature.insert(name.to_owned(), Feature { list: Some(list) });
    }

    /// The values of a feature; `None` if there is no such feature.
    pub fn values(&self, name: &str) -> Option<Values<'_>> {
        let feature = self.features.as_ref()?.feature.get(name)?;
        Some(match &feature.list {
            Some(List::Bytes(list)) => Values::Bytes(&list.value),
            Some(List::Floats(list)) => Values::Floats(&list.value),
            Some(List::Integers(list)) => Values::Integers(&list.value),
            None => Values::Nothing,
        })
    }

    /// The names of the features, in alphabetical order.
    pub fn names(&self) -> Vec<&str> {
        let features = self.features.as_ref().map(|features| &features.feature);
        features.into_iter().flat_map(BTreeMap::keys).map(String::as_str).collect()
    }

    /// The integers of a feature, each of which fits in 32 bits.
    ///
    /// # Errors
    /// There is no such feature, or it holds something else.
    pub fn integers(&self, name: &str) -> Result<Vec<i32>, String> {
        let List::Integers(IntegerList { value }) = self.list(name)? else {
            return Err(format!("`{name}` holds no integers"));
        };
        let narrow = |value: &i64| {
            i32::try_from(*value).map_err(|_| format!("`{name}` holds {value}, which has more than 32 bits"))
        };
        value.iter().map(narrow).collect()
    }

    /// The floating-point numbers of a feature.
    ///
    /// # Errors
    /// There is no such feature, or it holds something else.
    pub fn floats(&self, name: &str) -> Result<&[f32], String> {
        match self.list(name)? {
            List::Floats(FloatList { value }) => Ok(value),
            _ => Err(format!("`{name}` holds no floating-point numbers")),
        }
    }

    fn list(&self, name: &str) -> Result<&List, String> {
        let features = self.features.as_ref().map(|features| &features.feature);
        let list = features.and_then(|features| features.get(name)?.list.as_ref());
        list.ok_or_else(|| {
            let names = features.into_iter().flat_map(BTreeMap::keys);
            let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
            let known = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
            format!("it lacks `{name}` and holds {known}")
        })
    }
}
