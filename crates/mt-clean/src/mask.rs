//! Personal data in texts: addresses of mail, addresses of hosts, and telephone numbers, replaced by marks.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use regex::{Captures, Regex};
use serde::{Deserialize, Serialize};

/// A kind of personal data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    Email,
    Ip,
    Phone,
}

static EMAIL: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        r"(?-u:\b)[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?",
    )
    .expect("the pattern is well-formed")
});
static IP: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"[0-9A-Fa-f.:]*[0-9A-Fa-f][.:][0-9A-Fa-f.:]*[0-9A-Fa-f]").expect("the pattern is well-formed")
});
static PHONE: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        r"(?:\+[1-9][0-9]{0,2}[ .-]?(?:\([0-9]{1,4}\)[ .-]?)?[0-9]{1,4}(?:[ .-]?[0-9]{2,4}){1,4})|(?:\([0-9]{3}\)[ .-]?|[0-9]{3}[ .-])[0-9]{3}[ .-]?[0-9]{4}",
    )
    .expect("the pattern is well-formed")
});

impl Mask {
    /// All kinds with their names.
    pub const NAMES: [(&'static str, Self); 3] =
        [("email", Self::Email), ("ip", Self::Ip), ("phone", Self::Phone)];

    /// The name of the kind.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, mask)| *mask == self).map_or("", |(name, _)| name)
    }

    /// The mark that replaces the data.
    pub fn mark(self) -> &'static str {
        match self {
            Self::Email => "<EMAIL>",
            Self::Ip => "<IP_ADDRESS>",
            Self::Phone => "<PHONE>",
        }
    }

    /// The text with marks, and the number of them; `None` if there is no such data.
    pub fn apply(self, text: &str) -> Option<(String, u64)> {
        let pattern = match self {
            // The search for a byte is much faster than that for a pattern.
            Self::Email if !text.contains('@') => return None,
            Self::Ip | Self::Phone if !text.bytes().any(|byte| byte.is_ascii_digit()) => return None,
            Self::Email => &EMAIL,
            Self::Ip => &IP,
            Self::Phone => &PHONE,
        };
        let mut count = 0;
        let masked = pattern.replace_all(text, |found: &Captures<'_>| {
            let all = found.get(0).map_or(0..0, |all| all.range());
            let is_masked = match self {
                Self::Email => true,
                Self::Ip => is_public(&text[all.clone()]),
                Self::Phone => is_phone(text, all.start, all.end),
            };
            count += u64::from(is_masked);
            if is_masked { self.mark().to_owned() } else { text[all].to_owned() }
        });
        (count > 0).then(|| (masked.into_owned(), count))
    }
}

/// Whether a text is the address of a host in the public network.
fn is_public(text: &str) -> bool {
    if let Ok(address) = text.parse::<Ipv4Addr>() {
        let [first, second, ..] = address.octets();
        let is_shared = first == 100 && (64..128).contains(&second);
        return !(address.is_private()
            || address.is_loopback()
            || address.is_link_local()
            || address.is_documentation()
            || address.is_multicast()
            || first == 0
            || first >= 240
            || is_shared);
    }
    // A time such as `10:20` is no address of eight groups.
    text.parse::<Ipv6Addr>().is_ok_and(|address| {
        let [first, second, ..] = address.segments();
        (first & 0xe000) == 0x2000 && !(first == 0x2001 && second == 0xdb8)
    })
}

/// Whether a number of digits stands alone and has as many as a telephone number.
fn is_phone(text: &str, start: usize, end: usize) -> bool {
    let digits = text[start..end].bytes().filter(u8::is_ascii_digit).count();
    let joins = |character: char| character.is_alphanumeric() || "-/_.".contains(character);
    let before = text[..start].chars().next_back();
    let mut after = text[end..].chars();
    let next = after.next();
    // A period after the number ends the sentence, unless more digits follow.
    let is_end = match next {
        Some('.') => !after.next().is_some_and(char::is_alphanumeric),
        Some(next) => !joins(next),
        None => true,
    };
    (8..=15).contains(&digits) && is_end && !before.is_some_and(joins)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn personal_data_is_masked() {
        let check = |mask: Mask, text: &str, expected: Option<&str>| {
            assert_eq!(mask.apply(text).map(|(text, _)| text).as_deref(), expected, "{text}");
        };
        check(Mask::Email, "Write to jo.ann+x@mail.example.org, or not.", Some("Write to <EMAIL>, or not."));
        check(Mask::Email, "meet @ noon", None);
        check(Mask::Ip, "from 8.8.4.4 to 192.168.0.1", Some("from <IP_ADDRESS> to 192.168.0.1"));
        check(Mask::Ip, "version 1.2.3, at 10:20:30, 999.1.1.1", None);
        check(Mask::Ip, "at 2600:1f18::1, 2001:db8::1", Some("at <IP_ADDRESS>, 2001:db8::1"));
        check(Mask::Phone, "Call (555) 010-2345 or +49 30 1234567.", Some("Call <PHONE> or <PHONE>."));
        check(Mask::Phone, "ISBN 978-3-16-148410-0, 2020-01-02, 3.14159, 12345678901234567890", None);
    }
}
