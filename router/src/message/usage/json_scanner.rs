//! Scanner of one JSON value in transit, split at any place. It finds the few members of a response that the
//! router needs, and whether the value is complete.
//!
//! ```text
//! usage            tokens                       choices[].finish_reason    the finish reason
//! error            an error                     response.usage, .error     of events of /v1/responses
//! object, type     an error, if it is "error"   choices[].index            the choice that is counted
//! stop_reason      the finish reason of Messages  message.usage, delta.stop_reason   of its events
//! status           of a response, and response.status of its events
//! ```
//!
//! The scanner follows the structure: strings, brackets, and the names of the first three levels. It parses only
//! captured members. A model's text is inside a string and a client's tools are inside other members, so neither
//! can pose as `usage`.
//!
//! Memory is bounded by [`CAPTURED_BYTES_MAX`], and each byte is scanned once.

use memchr::memchr2;

use super::{FinishReason, Usage, read_output, read_usage};

/// Maximum bytes of a captured member: an engine's error with its trace.
const CAPTURED_BYTES_MAX: usize = 64 << 10;
/// The longest relevant name is `finish_reason`.
const NAME_BYTES_MAX: usize = 16;

/// State of the scan.
#[derive(Debug, Default)]
pub(crate) struct JsonScanner {
    members: ScannedMembers,
    nesting: Nesting,
    text: StringState,
    wants_name: bool,
    reads_name: bool,
    name: Vec<u8>,
    /// The member whose value comes next.
    pending_member: Option<JsonMember>,
    capture: Option<MemberCapture>,
}

/// The members that the router needs.
#[derive(Debug, Default)]
struct ScannedMembers {
    usage: Option<Usage>,
    /// Of a usage that lacks the prompt's tokens.
    output: Option<u64>,
    finish: Option<FinishReason>,
    error: Option<Vec<u8>>,
    /// `object` or `type` is `"error"`.
    is_error: bool,
    /// `status` is `"cancelled"`.
    is_cancelled: bool,
    /// There is a usage, readable or not.
    has_usage: bool,
    choices: usize,
    /// Of the last choice that contains one.
    index: usize,
}

/// The open brackets.
#[derive(Debug, Default)]
struct Nesting {
    begun: bool,
    /// The bytes are not one object or array.
    broken: bool,
    depth: usize,
    levels: [OpenBracket; LEVELS],
    /// The names of the innermost object are relevant.
    is_near: bool,
}

const LEVELS: usize = 3;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StringState {
    #[default]
    Outside,
    Inside,
    /// Behind a backslash.
    Escaped,
}

/// One open bracket.
#[derive(Clone, Copy, Debug, Default)]
struct OpenBracket {
    is_object: bool,
    member: Option<JsonMember>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JsonMember {
    Usage,
    Error,
    Kind,
    Choices,
    /// The object of an event whose members count.
    Response,
    Finish,
    Status,
    Index,
}

#[derive(Debug)]
struct MemberCapture {
    member: JsonMember,
    /// Number of open brackets where it began.
    depth: usize,
    bytes: Vec<u8>,
    too_long: bool,
}

impl JsonScanner {
    /// Scans a whole value.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut scanner = Self::default();
        scanner.feed(bytes);
        scanner
    }

    /// Scans the next bytes.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        let mut at = 0;
        let mut caught_from = 0;
        while at < bytes.len() && !self.nesting.broken {
            match self.text {
                StringState::Inside => {
                    let end = memchr2(b'"', b'\\', &bytes[at..]).map_or(bytes.len(), |found| at + found);
                    self.name(&bytes[at..end]);
                    at = end;
                    match bytes.get(at) {
                        None => break,
                        Some(b'"') => {
                            self.text = StringState::Outside;
                            self.reads_name = false;
                            at += 1;
                            self.finish_capture(&bytes[caught_from..at]);
                        }
                        Some(_) => {
                            self.name(b"\\");
                            self.text = StringState::Escaped;
                            at += 1;
                        }
                    }
                }
                StringState::Escaped => {
                    self.text = StringState::Inside;
                    at += 1;
                }
                StringState::Outside => {
                    at += self.nesting.blank(&bytes[at..]);
                    let Some(&byte) = bytes.get(at) else { break };
                    // Any value but `null`.
                    self.members.has_usage |= self.pending_member == Some(JsonMember::Usage)
                        && self.nesting.depth == 1
                        && matches!(byte, b'{' | b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f');
                    match byte {
                        b'"' => {
                            self.text = StringState::Inside;
                            self.reads_name = self.nesting.is_near && self.wants_name;
                            if self.reads_name {
                                self.name.clear();
                            } else if self.begins_capture(byte) {
                                caught_from = at;
                            }
                        }
                        b'{' | b'[' => {
                            if self.begins_capture(byte) {
                                caught_from = at;
                            }
                            self.open(byte == b'{');
                        }
                        b'}' | b']' => {
                            self.close(byte == b'}');
                            self.finish_capture(&bytes[caught_from..=at]);
                        }
                        b',' => (self.wants_name, self.pending_member) = (true, None),
                        b':' => {
                            self.wants_name = false;
                            self.pending_member = member(self.nesting.depth, &self.name);
                            if self.pending_member == Some(JsonMember::Index) {
                                self.members.index = 0;
                            }
                        }
                        b'0'..=b'9' if self.pending_member == Some(JsonMember::Index) => {
                            let index = &mut self.members.index;
                            *index = index.saturating_mul(10).saturating_add((byte - b'0').into());
                        }
                        // Parts of numbers, `null` and blanks.
                        _ => {}
                    }
                    at += 1;
                }
            }
        }
        if let Some(capture) = &mut self.capture {
            capture.add(&bytes[caught_from..]);
        }
    }

    /// Whether the bytes were one object or array, from its first bracket to its last.
    pub(crate) fn is_whole(&self) -> bool {
        self.nesting.begun && !self.nesting.broken && self.nesting.depth == 0
    }

    /// Whether the value is an object.
    pub(crate) fn is_object(&self) -> bool {
        self.nesting.begun && self.nesting.levels[0].is_object
    }

    /// Tokens; unknown if the object does not contain them.
    pub(crate) fn usage(&self) -> Option<Usage> {
        self.members.usage
    }

    /// Tokens of the output, also without those of the prompt.
    pub(crate) fn output(&self) -> Option<u64> {
        self.members.output
    }

    pub(crate) fn finish(&self) -> Option<FinishReason> {
        self.members.finish
    }

    /// Whether there is a usage that is not `null`. Its tokens may be unknown.
    pub(crate) fn has_usage(&self) -> bool {
        self.members.has_usage
    }

    /// Whether there is a choice that is an object.
    pub(crate) fn has_choice(&self) -> bool {
        self.members.choices > 0
    }

    /// The index of its choice, if it has exactly one.
    pub(crate) fn choice(&self) -> Option<usize> {
        (self.members.choices == 1).then_some(self.members.index)
    }

    /// Whether the value is an error instead of a response.
    pub(crate) fn is_error(&self) -> bool {
        self.members.is_error || self.members.error.is_some()
    }

    /// Whether the engine has cancelled the response.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.members.is_cancelled
    }

    /// Whether the value so far is an error, or an error has begun.
    pub(crate) fn begins_error(&self) -> bool {
        let begun = |capture: &MemberCapture| {
            let object = capture.bytes.starts_with(b"{");
            capture.member == JsonMember::Error && (object || capture.bytes.len() > 1 || capture.too_long)
        };
        self.is_error() || self.capture.as_ref().is_some_and(begun)
    }

    /// Whether the value can no longer become one whole object.
    pub(crate) fn is_no_object(&self) -> bool {
        self.nesting.broken || self.nesting.begun && !self.nesting.levels[0].is_object
    }

    /// The value of the member `error`, unchanged; empty if it is too long.
    #[cfg(test)]
    pub(crate) fn error(&self) -> Option<&[u8]> {
        self.members.error.as_deref()
    }

    fn name(&mut self, bytes: &[u8]) {
        if self.reads_name && self.name.len() <= NAME_BYTES_MAX {
            let room = NAME_BYTES_MAX + 1 - self.name.len();
            self.name.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    /// Begins a capture if the value that begins here is needed. Returns whether it does.
    fn begins_capture(&mut self, byte: u8) -> bool {
        if !self.nesting.is_near || self.capture.is_some() {
            return false;
        }
        let caught = match (self.pending_member, byte) {
            (Some(member @ (JsonMember::Usage | JsonMember::Error)), b'{') => member,
            (
                Some(
                    member @ (JsonMember::Error | JsonMember::Kind | JsonMember::Finish | JsonMember::Status),
                ),
                b'"',
            ) => member,
            _ => return false,
        };
        let bytes = Vec::new();
        self.capture =
            Some(MemberCapture { member: caught, depth: self.nesting.depth, bytes, too_long: false });
        true
    }

    fn open(&mut self, is_object: bool) {
        self.nesting.open(is_object, self.pending_member.take());
        self.wants_name = true;
        self.members.choices += usize::from(self.nesting.is_near && self.nesting.depth == LEVELS);
    }

    fn close(&mut self, is_object: bool) {
        self.nesting.close(is_object);
        (self.wants_name, self.pending_member) = (false, None);
    }

    /// Ends the capture, if it began at this depth.
    fn finish_capture(&mut self, bytes: &[u8]) {
        let depth = self.nesting.depth;
        let Some(mut capture) = self.capture.take_if(|capture| capture.depth == depth) else { return };
        capture.add(bytes);
        self.pending_member = None;
        self.members.record(capture);
    }
}

impl ScannedMembers {
    fn record(&mut self, MemberCapture { member, bytes, too_long, .. }: MemberCapture) {
        match member {
            JsonMember::Usage => {
                self.usage = read_usage(&bytes).or(self.usage);
                self.output = read_output(&bytes);
            }
            JsonMember::Error if too_long => self.error = Some(Vec::new()),
            JsonMember::Error if bytes != b"\"\"" => self.error = Some(bytes),
            JsonMember::Kind => self.is_error |= bytes == b"\"error\"",
            JsonMember::Status => self.is_cancelled = bytes == b"\"cancelled\"",
            JsonMember::Finish => {
                let text = bytes.strip_prefix(b"\"").and_then(|text| text.strip_suffix(b"\""));
                self.finish = Some(FinishReason::of(text.unwrap_or_default()));
            }
            JsonMember::Error | JsonMember::Choices | JsonMember::Response | JsonMember::Index => {}
        }
    }
}

impl Nesting {
    /// Number of bytes without effect.
    fn blank(&mut self, bytes: &[u8]) -> usize {
        if self.depth > 0 {
            return if self.is_near { 0 } else { unstructured(bytes) };
        }
        let blank = bytes.len() - bytes.trim_ascii_start().len();
        // A value begins with a bracket, and nothing follows its last.
        self.broken = bytes.get(blank).is_some_and(|byte| self.begun || !matches!(byte, b'{' | b'['));
        if self.broken { bytes.len() } else { blank }
    }

    /// Opens a bracket, of the value of `member`.
    fn open(&mut self, is_object: bool, member: Option<JsonMember>) {
        self.begun = true;
        if self.depth < LEVELS {
            self.levels[self.depth] = OpenBracket { is_object, member };
        }
        self.depth += 1;
        self.is_near = self.is_near();
    }

    fn close(&mut self, is_object: bool) {
        self.broken = self.depth <= LEVELS && self.levels[self.depth - 1].is_object != is_object;
        self.depth -= 1;
        self.is_near = self.is_near();
    }

    fn is_near(&self) -> bool {
        let [_, second, _] = self.levels;
        let matters = match self.depth {
            1 => true,
            2 => second.member == Some(JsonMember::Response),
            3 => second.member == Some(JsonMember::Choices) && !second.is_object,
            _ => return false,
        };
        matters && self.levels[self.depth - 1].is_object
    }
}

impl MemberCapture {
    fn add(&mut self, bytes: &[u8]) {
        self.too_long |= self.bytes.len() + bytes.len() > CAPTURED_BYTES_MAX;
        if !self.too_long {
            self.bytes.extend_from_slice(bytes);
        }
    }
}

fn member(depth: usize, name: &[u8]) -> Option<JsonMember> {
    Some(match (depth, name) {
        (1 | 2, b"usage") => JsonMember::Usage,
        (1 | 2, b"error") => JsonMember::Error,
        (1, b"object" | b"type") => JsonMember::Kind,
        (1, b"choices") => JsonMember::Choices,
        (1, b"response" | b"message" | b"delta") => JsonMember::Response,
        (3, b"finish_reason") | (1 | 2, b"stop_reason") => JsonMember::Finish,
        (1 | 2, b"status") => JsonMember::Status,
        (3, b"index") => JsonMember::Index,
        _ => return None,
    })
}

/// Number of bytes before the next quote or bracket. Some responses are mostly numbers, so 32 bytes are examined
/// together.
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
mod tests;
