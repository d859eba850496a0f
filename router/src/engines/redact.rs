//! Removal of engines' addresses from the texts that an engine sends to a client.
//!
//! An address is a URL, an IP address, a name with a port, or a name below a domain, as a person would read it.
//! Another name is an address only if an engine has it, or its domain.

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{PoisonError, RwLock};

/// Top-level domains of private networks: any name below them is an address.
const PRIVATE: [&str; 12] = [
    "local",
    "internal",
    "svc",
    "cluster",
    "pod",
    "lan",
    "localdomain",
    "intranet",
    "corp",
    "home",
    "arpa",
    "private",
];
/// Public ones: a name of three labels below them is an address. Those of two letters are public too.
const PUBLIC: [&str; 10] = ["com", "net", "org", "dev", "cloud", "app", "info", "example", "test", "tech"];

/// Replaces an address.
const REMOVED: &str = "[address]";

/// The hosts of the known engines, with the number of engines of each.
#[derive(Debug, Default)]
pub(crate) struct AddressRedactor(RwLock<HashMap<String, usize>>);

impl AddressRedactor {
    /// Adds an engine's host.
    pub(crate) fn add(&self, host: &str) {
        let mut hosts = self.0.write().unwrap_or_else(PoisonError::into_inner);
        *hosts.entry(host.to_ascii_lowercase()).or_default() += 1;
    }

    /// Removes an engine's host.
    pub(crate) fn remove(&self, host: &str) {
        let host = host.to_ascii_lowercase();
        let mut hosts = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(engines) = hosts.get_mut(&host) {
            *engines -= 1;
            if *engines == 0 {
                hosts.remove(&host);
            }
        }
    }

    /// Whether a text contains an address. To be called for all texts of an engine for a client, except generated
    /// ones.
    pub(crate) fn occur_in(&self, text: &str) -> bool {
        text.contains("://") || text.split(|c| !is_within(c)).any(|word| self.is_address(word))
    }

    /// A text with its addresses replaced by [`REMOVED`]; `None` if nothing else is left.
    pub(crate) fn redact<'t>(&self, text: &'t str) -> Option<Cow<'t, str>> {
        if !self.occur_in(text) {
            return (!text.is_empty()).then_some(Cow::Borrowed(text));
        }
        let (mut redacted, mut has_words, mut rest) = (String::with_capacity(text.len()), false, text);
        while !rest.is_empty() {
            let word = &rest[..rest.find(|c| !is_within(c)).unwrap_or(rest.len())];
            if rest[word.len()..].starts_with("//") && word.ends_with(':') {
                // A URL, with everything behind its host.
                let end = rest.find(|c: char| c.is_whitespace() || "\"'`<>(){},;".contains(c));
                rest = &rest[end.unwrap_or(rest.len())..];
                redacted.push_str(REMOVED);
            } else if self.is_address(word) {
                redacted.push_str(REMOVED);
                rest = &rest[word.len()..];
                // The port behind a bracket, as in `[fd00::7]:5600`, is removed too.
                if let Some(port) = rest.strip_prefix("]:") {
                    redacted.push(']');
                    rest = port.trim_start_matches(|c: char| c.is_ascii_digit());
                }
            } else if word.is_empty() {
                let other = rest.chars().next()?;
                redacted.push(other);
                rest = &rest[other.len_utf8()..];
            } else {
                has_words |= word.contains(|c: char| c.is_ascii_alphabetic());
                redacted.push_str(word);
                rest = &rest[word.len()..];
            }
        }
        (has_words && !self.occur_in(&redacted)).then_some(Cow::Owned(redacted))
    }

    fn is_address(&self, word: &str) -> bool {
        if word.is_empty() {
            return false;
        }
        // `key:address` and `address:` are words, too.
        let bare = word.trim_matches(['.', '-', '_']).trim_end_matches(':');
        let (host, port) = bare.rsplit_once(':').unwrap_or((bare, ""));
        let has_port = port.parse::<u16>().is_ok();
        let named = |host: &str| {
            let looks = !is_plain_word(host) && host.contains(|c: char| c.is_ascii_alphabetic());
            looks || self.is_known(host)
        };
        [word, bare, host].iter().any(|text| text.parse::<IpAddr>().is_ok())
            || bare
                .split(':')
                // Without a port, a plain word other than `localhost` is never a name.
                .filter(|part| !is_plain_word(part) || part.eq_ignore_ascii_case("localhost"))
                .any(|part| is_ip(part) || is_below_a_domain(part) || self.is_known(part))
            || has_port && host.rsplit(':').next().is_some_and(named)
    }

    /// Whether an engine has this name.
    fn is_known(&self, name: &str) -> bool {
        let name = name.to_ascii_lowercase();
        if name == "localhost" {
            return true;
        }
        let hosts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        hosts.contains_key(&name)
            || hosts.keys().any(|host| {
                let (first, domain) = host.split_once('.').unwrap_or((host, ""));
                let beside = domain.contains('.') && name.ends_with(domain);
                host.parse::<IpAddr>().is_err() && (first == name || beside)
            })
    }
}

/// Whether a text has no character that shows an address.
fn is_plain_word(text: &str) -> bool {
    !text.contains(|c: char| c.is_ascii_digit() || matches!(c, '.' | '-'))
}

/// Whether a character may be within an address.
fn is_within(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':')
}

/// Also recognizes IP addresses as cloud providers write them into names: `ip-10-0-0-7`.
fn is_ip(part: &str) -> bool {
    let dashed = |label: &str| {
        let numbers: Vec<&str> = label.rsplit('-').take(4).collect();
        numbers.len() == 4 && numbers.iter().all(|number| number.parse::<u8>().is_ok())
    };
    part.parse::<IpAddr>().is_ok() || part.split('.').any(dashed)
}

/// Whether a text is a name below a domain, and not a path into a body such as `messages.0.content`.
fn is_below_a_domain(part: &str) -> bool {
    let labels: Vec<&str> = part.trim_matches('.').split('.').collect();
    let is_label = |label: &&str| {
        !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    let numeric = |label: &&str| label.bytes().all(|byte| byte.is_ascii_digit());
    let [.., last] = labels[..] else { return false };
    if labels.len() < 2 || !labels.iter().all(is_label) {
        return false;
    }
    let last = last.to_ascii_lowercase();
    let country = last.len() == 2 && last.bytes().all(|byte| byte.is_ascii_alphabetic());
    let public = country || PUBLIC.contains(&last.as_str());
    PRIVATE.contains(&last.as_str()) || (labels.len() > 2 && public && !labels.iter().any(numeric))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts() -> AddressRedactor {
        let hosts = AddressRedactor::default();
        for host in ["decode", "p-17", "gpu7.rack.example", "10.0.0.7", "D2.Rack.Example"] {
            hosts.add(host);
        }
        hosts
    }

    #[test]
    fn an_address_is_redacted_at_any_position() {
        for said in [
            "cannot reach http://x/v1",
            "peer 10.0.0.7:5600 is gone",
            "from (10.0.0.7).",
            "host=10.0.0.7",
            "host:10.0.0.7, port:1",
            "{'remote_host': '10.0.0.7'}",
            "tcp:10.0.0.7:5600",
            "ip-10-0-0-7 is gone",
            "prefill-0.svc:5600 is gone",
            "decode0:8000",
            "decode:8000",
            "localhost:8000",
            "at localhost.",
            "peer [fd00::7]:5600 is gone",
            "from fd00::7",
            "from ::1",
            "decode-0.decode.default.svc.cluster.local is gone",
            "etcd.prod.company.com does not answer",
            "node=kv.prod.company.io",
            "P-17 does not answer",
            "(gpu7)",
            "other.rack.example",
            "d2.rack.example/v1",
        ] {
            assert!(hosts().occur_in(said), "{said}");
            let without = hosts().redact(said);
            assert!(without.is_none_or(|text| !hosts().occur_in(&text)), "{said}");
        }
    }

    #[test]
    fn a_text_is_kept_without_its_addresses() {
        for (said, kept) in [
            (
                "field required (see http://[fd00::7]:8000/x?y=1), or not",
                "field required (see [address]), or not",
            ),
            ("peer [fd00::7]:5600 is gone", "peer [[address]] is gone"),
            ("url='https://errors.pydantic.dev/2/v/missing', n=1", "url='[address]', n=1"),
            ("10.0.0.7:8000, decode:8000 and ähnliche", "[address], [address] and ähnliche"),
            ("`n` is 7", "`n` is 7"),
        ] {
            assert_eq!(hosts().redact(said).as_deref(), Some(kept), "{said}");
        }
        for nothing in ["", "http://10.0.0.7/x", "10.0.0.7: 5"] {
            assert_eq!(hosts().redact(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn field_paths_in_engine_errors_are_not_redacted() {
        for said in [
            "",
            "`stop[0]` must be a string of 1 to 1024 bytes: got 7",
            "messages.0.content.text: Field required",
            "body.messages.content is wrong",
            "('body', 'messages', 0, 'content')",
            "This model's maximum context length is 8 tokens. However, you requested 10 tokens (9 in the messages).",
            "The model `Qwen/Qwen2.5-7B-Instruct` does not exist.",
            "cannot decode the image, e.g. a PNG",
            "temperature: 2.5 is over 2.0; max_tokens:4096",
            "expected `:` at line 1 column 12",
            "at 10:30 on 2026-11-20",
            "response_format.json_schema.name",
        ] {
            assert!(!hosts().occur_in(said), "{said}");
        }
    }

    #[test]
    fn a_host_is_redacted_while_an_engine_uses_it() {
        let hosts = AddressRedactor::default();
        hosts.add("p-17");
        hosts.add("P-17");
        hosts.remove("p-17");
        assert!(hosts.occur_in("p-17"));
        hosts.remove("p-17");
        hosts.remove("p-17");
        assert!(!hosts.occur_in("p-17"));
        assert!(hosts.0.read().unwrap().is_empty());
    }
}
