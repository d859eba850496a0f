//! Bodies that try to say what only the router says: every internal name, in every place, spelled in every way, with a
//! marker as its value. What is not internal carries a text that must arrive.

/// In every value that must not reach an engine.
pub(crate) const MARKER: &str = "MARKER";
/// As a number.
pub(crate) const MARKER_DIGITS: &str = "90210902109021";

/// Internal wherever they are.
const EVERYWHERE: [&str; 3] = ["kv_transfer_params", "ec_transfer_params", "disaggregated_params"];
/// Internal at the top and in what engines read as the top.
const TOP: [&str; 20] = [
    "request_id",
    "rid",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_anything",
    "data_parallel_rank",
    "do_remote_decode",
    "do_remote_prefill",
    "abort_immediately",
    "disagg_prefill_dp_rank",
    "prefill_worker_id",
    "decode_worker_id",
    "backend_instance_id",
    "dp_rank",
];
const EXTENSIONS: [&str; 6] =
    ["vllm_xargs", "extra_body", "extra_args", "sampling_params", "custom_params", "nvext"];

/// Passed on to one engine.
const PASSED: [&str; 8] = [
    "/tokenize",
    "/detokenize",
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v1/score",
    "/v1/classify",
    "/pooling",
];

/// A generator of numbers that are the same every time.
pub(crate) struct Dice(pub u64);

impl Dice {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as usize % end
    }

    fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    fn yes(&mut self, in_hundred: usize) -> bool {
        self.below(100) < in_hundred
    }
}

/// One body.
pub(crate) struct Hostile {
    pub path: &'static str,
    pub body: String,
    /// Texts that must arrive.
    pub kept: Vec<String>,
    /// A top-level name comes twice: nothing of it may arrive at all.
    pub refused: bool,
}

struct Writer<'d> {
    dice: &'d mut Dice,
    kept: Vec<String>,
}

/// Of any endpoint.
pub(crate) fn hostile(dice: &mut Dice) -> Hostile {
    let path = match dice.below(10) {
        0..=3 => "/v1/completions",
        4..=6 => "/v1/chat/completions",
        7 => "/v1/responses",
        _ => *dice.one(&PASSED),
    };
    let mut writer = Writer { dice, kept: Vec::new() };
    let mut fields = vec![r#""model":"m""#.to_owned()];
    if path.ends_with("/completions") {
        fields.push(format!(r#""max_tokens":{}"#, 1 + writer.dice.below(64)));
        if writer.dice.yes(30) {
            fields.push(r#""stream":true,"stream_options":{"include_usage":true}"#.to_owned());
        }
        if writer.dice.yes(20) {
            fields.push(r#""n":2"#.to_owned());
        }
    }
    match path {
        "/v1/chat/completions" => {
            fields.push(writer.messages());
            if writer.dice.yes(30) {
                fields.push(writer.tools());
            }
        }
        "/v1/completions" => {
            let text = writer.keep();
            fields.push(match writer.dice.below(4) {
                0 => format!(r#""prompt":["{text}"]"#),
                1 => format!(r#""prompt":["{text}","more"]"#),
                _ => format!(r#""prompt":"{text}""#),
            });
        }
        "/v1/responses" => {
            let text = writer.keep();
            let hidden = writer.hidden();
            fields.push(match writer.dice.below(2) {
                0 => format!(r#""input":"{text}""#),
                _ => format!(r#""input":[{{"role":"user","content":"{text}"{hidden}}}]"#),
            });
            if writer.dice.yes(50) {
                fields.push(r#""store":true,"max_output_tokens":9"#.to_owned());
            }
        }
        "/detokenize" => fields.push(r#""tokens":[1,2,3]"#.to_owned()),
        "/tokenize" if writer.dice.yes(50) => fields.push(writer.messages()),
        "/tokenize" => {
            let text = writer.keep();
            fields.push(format!(r#""prompt":"{text}""#));
        }
        _ => {
            let (text, inside) = (writer.keep(), writer.object(false, 2));
            fields.push(format!(r#""input":["{text}",{inside}]"#));
        }
    }
    with_lies(writer, path, fields)
}

/// Of those whose stream another engine goes on with: only fields that are known, with something hidden in each that can
/// hold something.
pub(crate) fn resumable(dice: &mut Dice) -> Hostile {
    let mut writer = Writer { dice, kept: Vec::new() };
    let chat = writer.dice.yes(50);
    let (options, bias) = (writer.hidden(), writer.hidden());
    let template = writer.object(false, 2);
    let mut fields = vec![
        r#""model":"m","stream":true,"max_tokens":12,"temperature":0,"user":"u","top_p":1"#.to_owned(),
        format!(r#""stream_options":{{"include_usage":true{options}}}"#),
        format!(r#""logit_bias":{{"7":1{bias}}}"#),
    ];
    if chat {
        fields.push(writer.messages());
        fields.push(format!(r#""chat_template_kwargs":{template}"#));
    } else {
        let text = writer.keep();
        fields.push(format!(r#""prompt":"{text}""#));
        // What was to be kept in the template is not sent.
        writer.kept = vec![text];
    }
    if writer.dice.yes(70) {
        let all = [EVERYWHERE.as_slice(), TOP.as_slice()].concat();
        let name = *writer.dice.one(&all);
        fields.push(format!("{}:{}", writer.spelled(name), writer.marked()));
    }
    let path = if chat { "/v1/chat/completions" } else { "/v1/completions" };
    Hostile { path, body: format!("{{{}}}", fields.join(",")), kept: writer.kept, refused: false }
}

/// With internal names at the top, in extensions and in fields that nobody knows.
fn with_lies(mut writer: Writer<'_>, path: &'static str, mut fields: Vec<String>) -> Hostile {
    let mut used: Vec<&str> = Vec::new();
    for number in 0..1 + writer.dice.below(5) {
        match writer.dice.below(4) {
            0 | 1 => {
                let all = [EVERYWHERE.as_slice(), TOP.as_slice()].concat();
                let name = *writer.dice.one(&all);
                if !used.contains(&name) {
                    used.push(name);
                    fields.push(format!("{}:{}", writer.spelled(name), writer.marked()));
                }
            }
            2 => {
                let name = *writer.dice.one(&EXTENSIONS);
                if !used.contains(&name) {
                    used.push(name);
                    let inside = writer.object(true, 3);
                    fields.push(format!("{}:{inside}", writer.spelled(name)));
                }
            }
            _ => {
                let inside = writer.object(false, 4);
                let name = format!("unknown{number}");
                fields.push(format!("{}:{inside}", writer.spelled(&name)));
            }
        }
    }
    let mut refused = false;
    if writer.dice.yes(5) && !used.is_empty() {
        // The same name again, perhaps spelled otherwise.
        let name = *writer.dice.one(&used);
        fields.push(format!("{}:{}", writer.spelled(name), writer.marked()));
        refused = true;
    }
    let Writer { dice, kept } = writer;
    for index in (1..fields.len()).rev() {
        fields.swap(index, dice.below(index + 1));
    }
    let comma = *dice.one(&[",", " , ", ",\n\t"]);
    Hostile { path, body: format!("{{{}}}", fields.join(comma)), kept, refused }
}

impl Writer<'_> {
    /// A text that must arrive.
    fn keep(&mut self) -> String {
        let text = format!("keep{:012x}", self.dice.below(1 << 48));
        self.kept.push(text.clone());
        text
    }

    /// A name in quotes, some or all of its letters as escapes.
    fn spelled(&mut self, name: &str) -> String {
        let share = *self.dice.one(&[0, 0, 0, 10, 100]);
        let letters: String = name
            .chars()
            .map(|letter| match (self.dice.yes(share), self.dice.yes(50)) {
                (true, true) => format!("\\u{:04x}", letter as u32),
                (true, false) => format!("\\u{:04X}", letter as u32),
                (false, _) => letter.to_string(),
            })
            .collect();
        format!("\"{letters}\"")
    }

    /// A value that must not arrive.
    fn marked(&mut self) -> String {
        match self.dice.below(7) {
            0 => format!("\"{MARKER}\""),
            1 => format!("{{\"{MARKER}\":\"{MARKER}\"}}"),
            2 => format!("[[\"{MARKER}\"],{MARKER_DIGITS}]"),
            3 => MARKER_DIGITS.to_owned(),
            4 => format!(
                "{{\"remote_block_ids\":[[{MARKER_DIGITS}]],\"remote_host\":\"{MARKER}\",\"do_remote_prefill\":true}}"
            ),
            5 => format!("\"\\u004d\\u0041RKER {MARKER}\""),
            _ => format!(
                "{{\"a\":{{\"a\":[{{\"kv_transfer_params\":\"{MARKER}\",\"b\":1,\"b\":\"{MARKER}\"}}]}}}}"
            ),
        }
    }

    /// An object with marked fields at any depth and fields that must arrive.
    fn object(&mut self, extension: bool, levels: usize) -> String {
        let mut fields = Vec::new();
        for number in 0..1 + self.dice.below(3) {
            let text = self.keep();
            fields.push(format!("\"own{number}\":\"{text}\""));
        }
        for _ in 0..self.dice.below(3) {
            let name = if extension && self.dice.yes(70) {
                *self.dice.one(&TOP)
            } else {
                *self.dice.one(&EVERYWHERE)
            };
            fields.push(format!("{}:{}", self.spelled(name), self.marked()));
            if self.dice.yes(20) {
                fields.push(format!("{}:{}", self.spelled(name), self.marked()));
            }
        }
        if self.dice.yes(20) {
            // A name twice: the last one counts, for everybody.
            let text = self.keep();
            fields.push("\"twice\":{\"overwritten\":1}".to_owned());
            fields.push(format!("{}:\"{text}\"", self.spelled("twice")));
        }
        if levels > 0 && self.dice.yes(60) {
            let inner = self.object(extension, levels - 1);
            fields.push(match self.dice.below(3) {
                0 => format!("\"inner\":{inner}"),
                1 => format!("\"inner\":[{inner}]"),
                _ => format!("\"inner\":[1,[[{inner}]],null]"),
            });
        }
        format!("{{{}}}", fields.join(if self.dice.yes(50) { "," } else { " ,\n" }))
    }

    fn messages(&mut self) -> String {
        let mut messages = Vec::new();
        for _ in 0..1 + self.dice.below(3) {
            let text = self.keep();
            let content = match self.dice.below(3) {
                0 => {
                    let hidden = self.hidden();
                    format!(r#"[{{"type":"text","text":"{text}"{hidden}}}]"#)
                }
                _ => format!(r#""{text}""#),
            };
            let hidden = self.hidden();
            messages.push(format!(r#"{{"role":"user","content":{content}{hidden}}}"#));
        }
        format!("\"messages\":[{}]", messages.join(","))
    }

    fn tools(&mut self) -> String {
        let (text, hidden) = (self.keep(), self.hidden());
        format!(
            r#""tools":[{{"type":"function","function":{{"name":"f","parameters":{{"remote_control":"{text}"{hidden}}}}}}}]"#
        )
    }

    /// Perhaps one more field, which is internal wherever it is.
    fn hidden(&mut self) -> String {
        if self.dice.yes(70) {
            return String::new();
        }
        let name = *self.dice.one(&EVERYWHERE);
        format!(",{}:{}", self.spelled(name), self.marked())
    }
}

/// Whether the marker is anywhere in these bytes, as it is or in what they say.
pub(crate) fn is_marked(sent: &[u8]) -> bool {
    let has = |text: &str| text.contains(MARKER) || text.contains(MARKER_DIGITS);
    let text = String::from_utf8_lossy(sent);
    // Only an escape makes what is said differ from what is written.
    let said = || serde_json::from_slice::<serde_json::Value>(sent).map(|said| said.to_string());
    has(&text) || (text.contains('\\') && said().is_ok_and(|said| has(&said)))
}
