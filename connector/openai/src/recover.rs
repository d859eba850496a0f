//! Extracts one member from a body that cannot be parsed: truncated, followed by garbage, with invalid UTF-8, or with a
//! value that is not JSON.
//!
//! An engine that refuses such a request must still release its handoff. Nothing is guessed. The scanner walks the top
//! level of the object from the first byte. It is strict about structure (names, colons, commas, quotes and balanced
//! brackets) and lenient only inside other members' values. It stops where the structure breaks. A member counts only
//! if its value is complete and valid JSON by itself.
//!
//! Linear in the length of the body. Memory: one bit per level of nesting, and the found value.

use serde_json::Value;

use crate::limits::NESTING_MAX;

/// The value of the top-level member `name`, if it is complete and unambiguous.
///
/// `None` also for a duplicate member with two different values.
#[must_use]
pub fn recover_member(body: &[u8], name: &str) -> Option<Value> {
    let mut scanner = MemberScanner { bytes: body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body), at: 0 };
    let mut found: Option<Value> = None;
    scanner.expect(b'{')?;
    // Any error ends the walk. A value that was found before is complete.
    while let Some((key, value)) = scanner.member() {
        // The name may be spelled with escapes.
        if serde_json::from_slice::<String>(key).is_ok_and(|key| key == name) {
            let value = serde_json::from_slice(value).ok()?;
            if found.as_ref().is_some_and(|before| *before != value) {
                return None;
            }
            found = Some(value);
        }
        if scanner.expect(b',').is_none() {
            break;
        }
    }
    found
}

struct MemberScanner<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> MemberScanner<'a> {
    /// `"name": value`, both in their original spelling. A comma or the object's end must follow the value. A value
    /// that ends with its own bracket or quote may also be the end of the body.
    fn member(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        self.skip_space();
        let key = self.string()?;
        self.expect(b':')?;
        self.skip_space();
        let start = self.at;
        let first = self.peek()?;
        match first {
            b'"' => drop(self.string()?),
            b'{' | b'[' => self.nested()?,
            _ => self.scalar()?,
        }
        let value = &self.bytes[start..self.at];
        self.skip_space();
        let whole = match self.peek() {
            None => matches!(first, b'"' | b'{' | b'['),
            Some(next) => matches!(next, b',' | b'}'),
        };
        whole.then_some((key, value))
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while self.peek().is_some_and(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        self.skip_space();
        (self.peek()? == byte).then(|| self.at += 1)
    }

    /// A string with its quotes. The content is not checked.
    fn string(&mut self) -> Option<&'a [u8]> {
        let start = self.at;
        (self.peek()? == b'"').then(|| self.at += 1)?;
        loop {
            match self.peek()? {
                b'"' => break,
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        self.at += 1;
        Some(&self.bytes[start..self.at])
    }

    /// An object or array: only matching brackets are checked, to a bounded depth.
    fn nested(&mut self) -> Option<()> {
        // One bit per level: whether it is an array.
        let (mut kinds, mut depth) = (0u128, 0usize);
        loop {
            match self.peek()? {
                b'"' => {
                    self.string()?;
                    continue;
                }
                open @ (b'{' | b'[') => {
                    if depth == NESTING_MAX {
                        return None;
                    }
                    kinds = kinds << 1 | u128::from(open == b'[');
                    depth += 1;
                }
                close @ (b'}' | b']') => {
                    if (kinds & 1 == 1) != (close == b']') {
                        return None;
                    }
                    kinds >>= 1;
                    depth -= 1;
                    if depth == 0 {
                        self.at += 1;
                        return Some(());
                    }
                }
                _ => {}
            }
            self.at += 1;
        }
    }

    /// A number, a word, or another run of at least one byte without structure.
    fn scalar(&mut self) -> Option<()> {
        let start = self.at;
        while self.peek().is_some_and(|byte| !matches!(byte, b',' | b':' | b'"' | b'{' | b'}' | b'[' | b']'))
        {
            self.at += 1;
        }
        (self.at > start).then_some(())
    }
}

const _: () = assert!(NESTING_MAX <= 128, "a level of nesting is one bit of a u128");

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(body: impl AsRef<[u8]>) -> Option<Value> {
        recover_member(body.as_ref(), "kv")
    }

    #[test]
    fn a_member_is_recovered_despite_damage_elsewhere() {
        let kv = json!({"a": [1, {"b": "}"}], "c": "\"]"});
        for body in [
            format!(r#"{{"kv": {kv}}}"#),
            format!(r#"{{"kv": {kv}, "temperature": NaN, "x": tru"#),
            format!(r#"{{"temperature": NaN, "kv": {kv}}} and more"#),
            format!(r#"{{"x": 'single', "y": 01, "kv": {kv}, "#),
            format!(r#"  {{ "s": "a \" }} }} ]", "kv" : {kv} }}"#),
            format!(r#"{{"o": {{"kv": 7, "n": [NaN, {{}}]}}, "kv": {kv}}}"#),
            format!(r#"{{"\u006bv": {kv}, "rest": ["#),
            format!(r#"{{"kv": {kv}, "kv": {kv}}}"#),
            format!(r#"{{"n": 1, "kv": {kv}"#),
        ] {
            assert_eq!(found(&body), Some(kv.clone()), "{body}");
        }
        let mut bytes = b"\xEF\xBB\xBF{\"p\": \"\xff\xfe\", \"kv\": 7, \"\xff\": 1}".to_vec();
        assert_eq!(found(&bytes), Some(json!(7)));
        bytes.truncate(bytes.len() - 4);
        assert_eq!(found(&bytes), Some(json!(7)));
    }

    #[test]
    fn an_ambiguous_or_incomplete_member_is_not_recovered() {
        for body in [
            "",
            "x",
            "[]",
            r#"[{"kv": 1}]"#,
            r#""kv": 1"#,
            r#"{"kv": {"a": 1"#,
            r#"{"kv": 1"#,
            r#"{"kv": {"a": 1} {"#,
            r#"{"kv": {"a": NaN}}"#,
            r#"{"kv": {"a": 1]}"#,
            r#"{"kv": 1 2}"#,
            r#"{"kv": 1, "kv": 2}"#,
            r#"{"o": {"kv": 1}}"#,
            r#"{"s": "\"kv\": 1"}"#,
            r#"{"s": "unclosed, "kv": 1}"#,
            r#"{"o": [}, "kv": 1}"#,
            r#"{"a" 1, "kv": 1}"#,
            r#"{,"kv": 1}"#,
            r#"{"a": , "kv": 1}"#,
            r#"{kv: 1}"#,
            r#"{"kv": "cut off \"#,
        ] {
            assert_eq!(found(body), None, "{body}");
        }
        let deep = |depth: usize| format!("{{\"d\": {}{}, \"kv\": 1}}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(found(deep(NESTING_MAX)), Some(json!(1)));
        assert_eq!(found(deep(NESTING_MAX + 1)), None);
        assert_eq!(found(deep(1_000_000)), None);
    }

    #[test]
    fn a_whole_body_yields_the_member_and_a_truncated_one_the_same_or_none() {
        let kv = json!({"do_remote_prefill": true, "ids": [[1, 2, 3]], "text": "é\u{1F600}\\\"{"});
        let body = json!({"model": "m", "prompt": [1, 2], "stop": ["}", "\""], "kv": kv, "n": 1}).to_string();
        assert_eq!(found(&body), Some(kv.clone()));
        let complete = body.find(",\"n\"").expect("it is there");
        for cut in 0..body.len() {
            let expected = (cut >= complete).then(|| kv.clone());
            assert_eq!(found(&body.as_bytes()[..cut]), expected, "cut at {cut}");
        }
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let alphabet = b"{}[]\":,\\ kv1\xff\n";
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..200_000 {
            let bytes: Vec<u8> = (0..24)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    alphabet[(state >> 33) as usize % alphabet.len()]
                })
                .collect();
            let recovered = found(&bytes);
            if let Ok(whole) = serde_json::from_slice::<Value>(&bytes) {
                assert!(recovered.is_none() || whole.get("kv") == recovered.as_ref(), "{bytes:?}");
            }
        }
    }
}
