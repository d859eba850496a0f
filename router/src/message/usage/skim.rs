//! One JSON value read as it passes, cut anywhere: the few members of an answer that the router needs, and whether the
//! value is whole.
//!
//! ```text
//! usage            tokens                       choices[].finish_reason    why it finished
//! error            an error                     response.usage, .error     of events of /v1/responses
//! object, type     an error, if it is "error"      choices[].index            which one is counted
//! ```
//!
//! Structure is followed: strings, brackets, and the names of the first three levels. Only what is caught is parsed. A
//! model's text is inside a string and a client's tools are inside other members, so neither can pose as `usage`.
//!
//! Memory is bounded by [`CAUGHT_BYTES_MAX`]; each byte is looked at once.

use memchr::memchr2;

use super::{Finish, Usage, read_usage};

/// A member is caught up to this length: an engine's error with its trace.
const CAUGHT_BYTES_MAX: usize = 64 << 10;
/// The longest name that is looked for is `finish_reason`.
const NAME_BYTES_MAX: usize = 16;

/// What was read so far.
#[derive(Debug, Default)]
pub(crate) struct Skim {
    usage: Option<Usage>,
    finish: Option<Finish>,
    error: Option<Vec<u8>>,
    /// `object` or `type` is `"error"`.
    is_error: bool,
    /// There is a usage, whether it can be read or not.
    has_usage: bool,
    choices: usize,
    /// Of the last choice that says it.
    index: usize,
    begun: bool,
    broken: bool,
    text: Text,
    depth: usize,
    levels: [Level; LEVELS],
    /// The names of the innermost object matter.
    near: bool,
    wants_name: bool,
    reads_name: bool,
    name: Vec<u8>,
    /// The member whose value comes next.
    pending: Option<Member>,
    catching: Option<Catching>,
}

const LEVELS: usize = 3;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Text {
    #[default]
    Outside,
    Inside,
    /// Behind a backslash.
    Escaped,
}

/// One open bracket.
#[derive(Clone, Copy, Debug, Default)]
struct Level {
    is_object: bool,
    member: Option<Member>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    Usage,
    Error,
    Kind,
    Choices,
    Response,
    Finish,
    Index,
}

#[derive(Debug)]
struct Catching {
    member: Member,
    /// Brackets that were open where it began.
    depth: usize,
    bytes: Vec<u8>,
    too_long: bool,
}

impl Skim {
    /// All of a value at once.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut skim = Self::default();
        skim.feed(bytes);
        skim
    }

    /// Reads the next bytes.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        let mut at = 0;
        let mut caught_from = 0;
        while at < bytes.len() && !self.broken {
            match self.text {
                Text::Inside => {
                    let end = memchr2(b'"', b'\\', &bytes[at..]).map_or(bytes.len(), |found| at + found);
                    self.name(&bytes[at..end]);
                    at = end;
                    match bytes.get(at) {
                        None => break,
                        Some(b'"') => {
                            self.text = Text::Outside;
                            self.reads_name = false;
                            at += 1;
                            self.caught_at(self.depth, &bytes[caught_from..at]);
                        }
                        Some(_) => {
                            self.name(b"\\");
                            self.text = Text::Escaped;
                            at += 1;
                        }
                    }
                }
                Text::Escaped => {
                    self.text = Text::Inside;
                    at += 1;
                }
                Text::Outside => {
                    at += self.blank(&bytes[at..]);
                    let Some(&byte) = bytes.get(at) else { break };
                    // Anything but `null`.
                    self.has_usage |= self.pending == Some(Member::Usage)
                        && self.depth == 1
                        && matches!(byte, b'{' | b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f');
                    match byte {
                        b'"' => {
                            self.text = Text::Inside;
                            self.reads_name = self.near && self.wants_name;
                            if self.reads_name {
                                self.name.clear();
                            } else if self.begins(byte) {
                                caught_from = at;
                            }
                        }
                        b'{' | b'[' => {
                            if self.begins(byte) {
                                caught_from = at;
                            }
                            self.open(byte == b'{');
                        }
                        b'}' | b']' => {
                            self.close(byte == b'}');
                            self.caught_at(self.depth, &bytes[caught_from..=at]);
                        }
                        b',' => (self.wants_name, self.pending) = (true, None),
                        b':' => {
                            self.wants_name = false;
                            self.pending = member(self.depth, &self.name);
                            if self.pending == Some(Member::Index) {
                                self.index = 0;
                            }
                        }
                        b'0'..=b'9' if self.pending == Some(Member::Index) => {
                            self.index = self.index.saturating_mul(10).saturating_add((byte - b'0').into());
                        }
                        // Of numbers, `null` and blanks.
                        _ => {}
                    }
                    at += 1;
                }
            }
        }
        if let Some(catching) = &mut self.catching {
            catching.add(&bytes[caught_from..]);
        }
    }

    /// Whether the bytes were one object or array, from its first bracket to its last.
    pub(crate) fn is_whole(&self) -> bool {
        self.begun && !self.broken && self.depth == 0
    }

    /// Whether the value is an object.
    pub(crate) fn is_object(&self) -> bool {
        self.begun && self.levels[0].is_object
    }

    /// Tokens; unknown where the object does not say them.
    pub(crate) fn usage(&self) -> Option<Usage> {
        self.usage
    }

    pub(crate) fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Whether there is a usage that is not `null`, of which tokens may be unknown.
    pub(crate) fn has_usage(&self) -> bool {
        self.has_usage
    }

    /// Whether it has a choice that is an object.
    pub(crate) fn has_choice(&self) -> bool {
        self.choices > 0
    }

    /// The number of its choice, where it has one.
    pub(crate) fn choice(&self) -> Option<usize> {
        (self.choices == 1).then_some(self.index)
    }

    /// Whether it is an error instead of an answer.
    pub(crate) fn is_error(&self) -> bool {
        self.is_error || self.error.is_some()
    }

    /// Whether it is one as far as it has come, or in the middle of saying so.
    pub(crate) fn begins_error(&self) -> bool {
        let begun = |catching: &Catching| {
            let object = catching.bytes.starts_with(b"{");
            catching.member == Member::Error && (object || catching.bytes.len() > 1 || catching.too_long)
        };
        self.is_error() || self.catching.as_ref().is_some_and(begun)
    }

    /// Whether it can no longer become one whole object.
    pub(crate) fn is_no_object(&self) -> bool {
        self.broken || self.begun && !self.levels[0].is_object
    }

    /// The value of the member `error`, as it came; empty where it is too long.
    #[cfg(test)]
    pub(crate) fn error(&self) -> Option<&[u8]> {
        self.error.as_deref()
    }

    /// Bytes that mean nothing here.
    fn blank(&mut self, bytes: &[u8]) -> usize {
        if self.depth > 0 {
            return if self.near { 0 } else { unstructured(bytes) };
        }
        let blank = bytes.len() - bytes.trim_ascii_start().len();
        // A value begins with a bracket, and nothing follows its last.
        self.broken = bytes.get(blank).is_some_and(|byte| self.begun || !matches!(byte, b'{' | b'['));
        if self.broken { bytes.len() } else { blank }
    }

    fn name(&mut self, bytes: &[u8]) {
        if self.reads_name && self.name.len() <= NAME_BYTES_MAX {
            let room = NAME_BYTES_MAX + 1 - self.name.len();
            self.name.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    /// Whether the value that begins here is to be caught.
    fn begins(&mut self, byte: u8) -> bool {
        if !self.near || self.catching.is_some() {
            return false;
        }
        let caught = match (self.pending, byte) {
            (Some(member @ (Member::Usage | Member::Error)), b'{') => member,
            (Some(member @ (Member::Error | Member::Kind | Member::Finish)), b'"') => member,
            _ => return false,
        };
        let bytes = Vec::new();
        self.catching = Some(Catching { member: caught, depth: self.depth, bytes, too_long: false });
        true
    }

    fn open(&mut self, is_object: bool) {
        let member = self.pending.take();
        self.begun = true;
        if self.depth < LEVELS {
            self.levels[self.depth] = Level { is_object, member };
        }
        self.depth += 1;
        self.near = self.is_near();
        self.wants_name = true;
        self.choices += usize::from(self.near && self.depth == LEVELS);
    }

    fn close(&mut self, is_object: bool) {
        self.broken = self.depth <= LEVELS && self.levels[self.depth - 1].is_object != is_object;
        self.depth -= 1;
        self.near = self.is_near();
        (self.wants_name, self.pending) = (false, None);
    }

    fn is_near(&self) -> bool {
        let [_, second, _] = self.levels;
        let matters = match self.depth {
            1 => true,
            2 => second.member == Some(Member::Response),
            3 => second.member == Some(Member::Choices) && !second.is_object,
            _ => return false,
        };
        matters && self.levels[self.depth - 1].is_object
    }

    /// What is being caught ends here, if it began at this depth.
    fn caught_at(&mut self, depth: usize, bytes: &[u8]) {
        let Some(mut caught) = self.catching.take_if(|catching| catching.depth == depth) else { return };
        caught.add(bytes);
        self.pending = None;
        let Catching { member, bytes, too_long, .. } = caught;
        match member {
            Member::Usage => self.usage = read_usage(&bytes).or(self.usage),
            Member::Error if too_long => self.error = Some(Vec::new()),
            Member::Error if bytes != b"\"\"" => self.error = Some(bytes),
            Member::Kind => self.is_error |= bytes == b"\"error\"",
            Member::Finish => {
                let text = bytes.strip_prefix(b"\"").and_then(|text| text.strip_suffix(b"\""));
                self.finish = Some(Finish::of(text.unwrap_or_default()));
            }
            Member::Error | Member::Choices | Member::Response | Member::Index => {}
        }
    }
}

impl Catching {
    fn add(&mut self, bytes: &[u8]) {
        self.too_long |= self.bytes.len() + bytes.len() > CAUGHT_BYTES_MAX;
        if !self.too_long {
            self.bytes.extend_from_slice(bytes);
        }
    }
}

fn member(depth: usize, name: &[u8]) -> Option<Member> {
    Some(match (depth, name) {
        (1 | 2, b"usage") => Member::Usage,
        (1 | 2, b"error") => Member::Error,
        (1, b"object" | b"type") => Member::Kind,
        (1, b"choices") => Member::Choices,
        (1, b"response") => Member::Response,
        (3, b"finish_reason") => Member::Finish,
        (3, b"index") => Member::Index,
        _ => return None,
    })
}

/// How many bytes come before the next quote or bracket. Numbers are most of some answers: 32 are looked at together.
fn unstructured(bytes: &[u8]) -> usize {
    const TOGETHER: usize = 32;
    // `[` and `{`, `]` and `}` differ in one bit.
    let matters = |byte: u8| (byte | 0x20 == b'{') | (byte | 0x20 == b'}') | (byte == b'"');
    let (blocks, _) = bytes.as_chunks::<TOGETHER>();
    let without = |block: &&[u8; TOGETHER]| !block.iter().fold(false, |any, byte| any | matters(*byte));
    let skipped = blocks.iter().take_while(without).count() * TOGETHER;
    let rest = &bytes[skipped..];
    skipped + rest.iter().position(|byte| matters(*byte)).unwrap_or(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str, piece: usize) -> Skim {
        let mut skim = Skim::default();
        text.as_bytes().chunks(piece).for_each(|piece| skim.feed(piece));
        skim
    }

    /// What it says, however it is cut.
    fn read(text: &str) -> Skim {
        let whole = Skim::of(text.as_bytes());
        for piece in (1..text.len().min(12)).chain([57, 301]) {
            let cut = cut(text, piece);
            let facts = |skim: &Skim| {
                let error = skim.error().map(<[u8]>::to_vec);
                let counted = (skim.usage(), skim.has_usage(), skim.choice());
                (counted, skim.finish(), error, skim.is_error(), skim.has_choice(), skim.is_whole())
            };
            assert_eq!(facts(&cut), facts(&whole), "in pieces of {piece}: {text}");
        }
        whole
    }

    const USAGE: Option<Usage> = Some(Usage { prompt: 7, cached: 4, completion: 2 });
    const TOKENS: &str = r#""usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}"#;

    #[test]
    fn usage_is_read_wherever_it_stands_and_however_it_is_cut() {
        let ids = (0..2000).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
        for text in [
            format!("{{{TOKENS}}}"),
            format!(r#"{{{TOKENS},"prompt_token_ids":[{ids}]}}"#),
            format!(
                r#"{{"choices":[{{"text":"a","finish_reason":"stop"}}],{TOKENS},"prompt_logprobs":[null,{{"7":{{"rank":1}}}}]}}"#
            ),
            format!(r#"{{"choices":[],"prompt_logprobs":[{{"a":[[{ids}]]}}], {TOKENS} }}"#),
            format!(
                r#"{{"type":"response.completed","response":{{"tools":[{{"usage":{{}}}}],{TOKENS},"error":null}}}}"#
            ),
        ] {
            let skim = read(&text);
            assert!(skim.usage() == USAGE && skim.is_whole() && !skim.is_error(), "{text}");
        }
        assert_eq!(
            read(r#"{"choices":[{"finish_reason":null},{"finish_reason":"length"}]}"#).finish(),
            Some(Finish::Length)
        );
    }

    #[test]
    fn neither_a_text_nor_a_member_of_another_poses_as_usage_or_error() {
        for text in [
            format!(
                r#"{{"choices":[{{"text":{:?},"error":{{}}}}]}}"#,
                format!("{{{TOKENS}, \"error\": {{}}}}")
            ),
            format!(r#"{{"tools":[{{{TOKENS}}}],"metadata":{{{TOKENS},"error":{{"code":400}}}}}}"#),
            format!(r#"{{"a \"usage":{{"prompt_tokens":1}},"\\":{{{TOKENS}}}}}"#),
            format!(r#"[{{{TOKENS},"error":{{}}}}]"#),
            r#"{"choices":[{"message":{"usage":{"prompt_tokens":1},"finish_reason":"stop"}}]}"#.to_owned(),
            r#"{"error":null,"usage":null,"object":"list","type":7}"#.to_owned(),
            r#"{"error":"","usage":{}}"#.to_owned(),
            r#"{"error":false,"usage":[{"prompt_tokens":1}]}"#.to_owned(),
            r#"{"response":[{"usage":{"prompt_tokens":1}}],"object":"err\u006fr"}"#.to_owned(),
        ] {
            let skim = read(&text);
            assert_eq!((skim.usage(), skim.finish(), skim.is_error()), (None, None, false), "{text}");
            assert!(skim.is_whole(), "{text}");
        }
    }

    #[test]
    fn a_usage_is_seen_although_it_cannot_be_read_and_a_choice_by_its_number() {
        for (usage, has) in
            [("{}", true), ("7", true), (" [7]", true), ("\"\"", true), ("false", true), ("null", false)]
        {
            let skim = read(&format!(r#"{{"id":"u","usage":{usage},"x":{{"index":3}}}}"#));
            assert_eq!((skim.has_usage(), skim.usage(), skim.choice()), (has, None, None), "{usage}");
        }
        for (choices, choice) in [
            (r#"[{"index":12,"delta":{"index":3}}]"#, Some(12)),
            (r#"[{"delta":{"tool_calls":[{"index":3}]},"index": 0}]"#, Some(0)),
            (r#"[{"index":null}]"#, Some(0)),
            (r#"[{"index":1},{"index":2}]"#, None),
            (r#"[{"index":99999999999999999999}]"#, Some(usize::MAX)),
            ("[]", None),
        ] {
            assert_eq!(read(&format!(r#"{{"choices":{choices}}}"#)).choice(), choice, "{choices}");
        }
    }

    #[test]
    fn an_error_is_read_in_each_of_its_dialects() {
        for (text, error) in [
            (r#"{"error":{"message":"}\"{"}}"#, Some(r#"{"message":"}\"{"}"#)),
            (r#"{"id":1,"error":"out of memory"}"#, Some("\"out of memory\"")),
            (r#"{"object" : "error","message":"x"}"#, None),
            (r#"{"type":"error","message":"x"}"#, None),
            (
                r#"{"response":{"id":"r","error":{"code":"server_error"}}}"#,
                Some(r#"{"code":"server_error"}"#),
            ),
        ] {
            let skim = read(text);
            assert!(skim.is_error(), "{text}");
            assert_eq!(skim.error(), error.map(str::as_bytes), "{text}");
        }
        for (text, begins) in [
            (r#"{"error":{"#, true),
            (r#"{"choices":[{"text":"a"}],"error":{"message":"10.0.0"#, true),
            (r#"{"error":"out"#, true),
            ("{\"error\":\"", false),
            (r#"{"error":""}"#, false),
            (r#"{"error":null,"choices":[{"error":{"#, false),
            (r#"{"metadata":{"error":{"#, false),
        ] {
            assert_eq!(read(text).begins_error(), begins, "{text}");
        }
        let long = format!(r#"{{"error":{{"message":"{}"}}}}"#, "x".repeat(CAUGHT_BYTES_MAX));
        assert_eq!(cut(&long, 4096).error(), Some(&b""[..]), "bounded");
    }

    #[test]
    fn a_value_that_is_cut_empty_or_something_else_is_not_whole() {
        let whole = format!(r#"{{"choices":[{{"text":"a\"}}","n":[1,[2]]}}],{TOKENS}}}"#);
        assert!(read(&format!(" \r\n{whole}\n ")).is_whole());
        for end in 0..whole.len() {
            assert!(!Skim::of(&whole.as_bytes()[..end]).is_whole(), "{}", &whole[..end]);
        }
        for text in [
            "",
            " ",
            "<html>{}</html>",
            "Internal Server Error",
            "{}{}",
            "{} x",
            "}",
            "{]",
            "[}",
            "\"{}\"",
            "7",
        ] {
            assert!(!read(text).is_whole(), "{text}");
        }
        assert!(read("[[],{}]").is_whole() && !Skim::of(b"[]").is_object() && Skim::of(b"{}").is_object());
    }

    proptest::proptest! {
        /// Whatever JSON it is: whole, and cut anywhere it is not.
        #[test]
        fn any_json_is_whole_and_none_of_its_beginnings_is(text in json(), cut in 0..1000_usize) {
            assert!(read(&text).is_whole());
            assert!(!Skim::of(&text.as_bytes()[..cut % text.len()]).is_whole());
        }

        #[test]
        fn any_bytes_are_read_alike_however_they_are_cut(text in r#"[\[\]{}",:\\ae]{0,60}"#) {
            read(&text);
        }
    }

    fn json() -> impl proptest::strategy::Strategy<Value = String> {
        use proptest::prelude::*;
        let leaf = proptest::prop_oneof![
            Just(serde_json::Value::Null),
            any::<i64>().prop_map(Into::into),
            ".*".prop_map(serde_json::Value::from),
        ];
        let names = proptest::prop_oneof![Just("usage".to_owned()), Just("choices".to_owned()), ".{0,4}"];
        leaf.prop_recursive(5, 40, 6, move |inner| {
            proptest::prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(serde_json::Value::from),
                proptest::collection::hash_map(names.clone(), inner, 0..6)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
        .prop_map(|value| serde_json::json!([value]).to_string())
    }
}
