//! Bodies with the router's internal names in every position and spelling, and a marker as their value. Every other
//! field contains a text that must arrive.

/// Part of every value that must not reach an engine.
pub(crate) const MARKER: &str = "MARKER";
/// The marker as a number.
pub(crate) const MARKER_DIGITS: &str = "90210902109021";

/// Internal in any position.
const EVERYWHERE: [&str; 3] = ["kv_transfer_params", "ec_transfer_params", "disaggregated_params"];
/// Internal at the top level and in the objects that engines read as the top level.
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

/// Endpoints passed to one engine.
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

/// A reproducible random number generator.
pub(crate) struct TestRng(pub u64);

impl TestRng {
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
pub(crate) struct HostileBody {
    pub path: &'static str,
    pub body: String,
    /// Texts that must arrive.
    pub expected_texts: Vec<String>,
    /// A top-level name occurs twice, so the request must be refused.
    pub refused: bool,
}

struct HostileWriter<'d> {
    rng: &'d mut TestRng,
    kept: Vec<String>,
}

/// A body for any endpoint.
pub(crate) fn hostile(rng: &mut TestRng) -> HostileBody {
    let path = match rng.below(10) {
        0..=3 => "/v1/completions",
        4..=6 => "/v1/chat/completions",
        7 => "/v1/responses",
        _ => *rng.one(&PASSED),
    };
    let mut writer = HostileWriter { rng, kept: Vec::new() };
    let mut fields = vec![r#""model":"m""#.to_owned()];
    if path.ends_with("/completions") {
        fields.push(format!(r#""max_tokens":{}"#, 1 + writer.rng.below(64)));
        if writer.rng.yes(30) {
            fields.push(r#""stream":true,"stream_options":{"include_usage":true}"#.to_owned());
        }
        if writer.rng.yes(20) {
            fields.push(r#""n":2"#.to_owned());
        }
    }
    match path {
        "/v1/chat/completions" => {
            fields.push(writer.messages());
            if writer.rng.yes(30) {
                fields.push(writer.tools());
            }
        }
        "/v1/completions" => {
            let text = writer.keep();
            fields.push(match writer.rng.below(4) {
                0 => format!(r#""prompt":["{text}"]"#),
                1 => format!(r#""prompt":["{text}","more"]"#),
                _ => format!(r#""prompt":"{text}""#),
            });
        }
        "/v1/responses" => {
            let text = writer.keep();
            let hidden = writer.hidden();
            fields.push(match writer.rng.below(2) {
                0 => format!(r#""input":"{text}""#),
                _ => format!(r#""input":[{{"role":"user","content":"{text}"{hidden}}}]"#),
            });
            if writer.rng.yes(50) {
                fields.push(r#""store":true,"max_output_tokens":9"#.to_owned());
            }
        }
        "/detokenize" => fields.push(r#""tokens":[1,2,3]"#.to_owned()),
        "/tokenize" if writer.rng.yes(50) => fields.push(writer.messages()),
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

/// A body whose stream another engine can continue: only known fields, with something hidden in each field that can
/// contain it.
pub(crate) fn resumable(rng: &mut TestRng) -> HostileBody {
    let mut writer = HostileWriter { rng, kept: Vec::new() };
    let chat = writer.rng.yes(50);
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
        // The texts in the template are not sent.
        writer.kept = vec![text];
    }
    if writer.rng.yes(70) {
        let all = [EVERYWHERE.as_slice(), TOP.as_slice()].concat();
        let name = *writer.rng.one(&all);
        fields.push(format!("{}:{}", writer.spelled(name), writer.marked()));
    }
    let path = if chat { "/v1/chat/completions" } else { "/v1/completions" };
    HostileBody {
        path,
        body: format!("{{{}}}", fields.join(",")),
        expected_texts: writer.kept,
        refused: false,
    }
}

/// A body with internal names at the top level, in extensions and in unknown fields.
fn with_lies(mut writer: HostileWriter<'_>, path: &'static str, mut fields: Vec<String>) -> HostileBody {
    let mut used: Vec<&str> = Vec::new();
    for number in 0..1 + writer.rng.below(5) {
        match writer.rng.below(4) {
            0 | 1 => {
                let all = [EVERYWHERE.as_slice(), TOP.as_slice()].concat();
                let name = *writer.rng.one(&all);
                if !used.contains(&name) {
                    used.push(name);
                    fields.push(format!("{}:{}", writer.spelled(name), writer.marked()));
                }
            }
            2 => {
                let name = *writer.rng.one(&EXTENSIONS);
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
    if writer.rng.yes(5) && !used.is_empty() {
        // The same name again, possibly in another spelling.
        let name = *writer.rng.one(&used);
        fields.push(format!("{}:{}", writer.spelled(name), writer.marked()));
        refused = true;
    }
    let HostileWriter { rng, kept } = writer;
    for index in (1..fields.len()).rev() {
        fields.swap(index, rng.below(index + 1));
    }
    let comma = *rng.one(&[",", " , ", ",\n\t"]);
    HostileBody { path, body: format!("{{{}}}", fields.join(comma)), expected_texts: kept, refused }
}

impl HostileWriter<'_> {
    /// A text that must arrive.
    fn keep(&mut self) -> String {
        let text = format!("keep{:012x}", self.rng.below(1 << 48));
        self.kept.push(text.clone());
        text
    }

    /// A name in quotes, with some or all of its letters escaped.
    fn spelled(&mut self, name: &str) -> String {
        let share = *self.rng.one(&[0, 0, 0, 10, 100]);
        let letters: String = name
            .chars()
            .map(|letter| match (self.rng.yes(share), self.rng.yes(50)) {
                (true, true) => format!("\\u{:04x}", letter as u32),
                (true, false) => format!("\\u{:04X}", letter as u32),
                (false, _) => letter.to_string(),
            })
            .collect();
        format!("\"{letters}\"")
    }

    /// A value that must not arrive.
    fn marked(&mut self) -> String {
        match self.rng.below(7) {
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
        for number in 0..1 + self.rng.below(3) {
            let text = self.keep();
            fields.push(format!("\"own{number}\":\"{text}\""));
        }
        for _ in 0..self.rng.below(3) {
            let name =
                if extension && self.rng.yes(70) { *self.rng.one(&TOP) } else { *self.rng.one(&EVERYWHERE) };
            fields.push(format!("{}:{}", self.spelled(name), self.marked()));
            if self.rng.yes(20) {
                fields.push(format!("{}:{}", self.spelled(name), self.marked()));
            }
        }
        if self.rng.yes(20) {
            // A duplicate name: all parsers use the last one.
            let text = self.keep();
            fields.push("\"twice\":{\"overwritten\":1}".to_owned());
            fields.push(format!("{}:\"{text}\"", self.spelled("twice")));
        }
        if levels > 0 && self.rng.yes(60) {
            let inner = self.object(extension, levels - 1);
            fields.push(match self.rng.below(3) {
                0 => format!("\"inner\":{inner}"),
                1 => format!("\"inner\":[{inner}]"),
                _ => format!("\"inner\":[1,[[{inner}]],null]"),
            });
        }
        format!("{{{}}}", fields.join(if self.rng.yes(50) { "," } else { " ,\n" }))
    }

    fn messages(&mut self) -> String {
        let mut messages = Vec::new();
        for _ in 0..1 + self.rng.below(3) {
            let text = self.keep();
            let content = match self.rng.below(3) {
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

    /// Possibly one more field that is internal in any position.
    fn hidden(&mut self) -> String {
        if self.rng.yes(70) {
            return String::new();
        }
        let name = *self.rng.one(&EVERYWHERE);
        format!(",{}:{}", self.spelled(name), self.marked())
    }
}

/// Whether these bytes contain the marker, literally or after parsing.
pub(crate) fn is_marked(sent: &[u8]) -> bool {
    let has = |text: &str| text.contains(MARKER) || text.contains(MARKER_DIGITS);
    let text = String::from_utf8_lossy(sent);
    // Only an escape makes the parsed text differ from the bytes.
    let parsed = || serde_json::from_slice::<serde_json::Value>(sent).map(|value| value.to_string());
    has(&text) || (text.contains('\\') && parsed().is_ok_and(|parsed| has(&parsed)))
}
