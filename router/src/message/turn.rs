//! What a decode engine of vLLM keeps for a conversation's next turn: it returns transfer parameters with its response,
//! and the router needs the tokens that they stand for. The recorder reads both and removes what the client did not ask
//! for. Pure.
//!
//! vLLM's prefill engine does not compare the tokens of its prompt with those of the blocks that it reads
//! (`nixl/pull_scheduler.py`). A wrong match gives a wrong response without an error. So the recorder trusts nothing but
//! token ids: without those of the whole prompt and response there is no kept turn.

use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value};

use crate::message::{handoff_params, sse};

/// Most bytes of a whole reply that is parsed, and most tokens of a kept turn: those of a context of a million tokens.
const REPLY_BYTES_MAX: usize = 16 << 20;
const TOKENS_MAX: usize = 1 << 20;
/// Most bytes of transfer parameters: 65,536 block ids.
const PARAMS_BYTES_MAX: usize = 1 << 20;

/// Reads one response.
#[derive(Debug)]
pub(crate) struct TurnRecorder {
    prompt: Option<Vec<u32>>,
    output: Vec<u32>,
    params: Option<Map<String, Value>>,
    /// The client asked for token ids, too.
    keeps_ids: bool,
    /// A part could not be read.
    is_incomplete: bool,
}

/// What an ended response leaves at its engine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum KeptBlocks {
    /// Their tokens are known.
    Turn(EndedTurn),
    /// No request may read them: the transfer parameters of their release.
    Unknown(String),
}

/// The turn of an ended response.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct EndedTurn {
    /// The tokens of the kept blocks.
    pub tokens: Box<[u32]>,
    /// The transfer parameters of the next prefill leg.
    pub params: String,
    /// The engine id of the process that keeps the blocks.
    pub engine: String,
}

impl TurnRecorder {
    pub(crate) fn new(keeps_ids: bool) -> Self {
        Self { prompt: None, output: Vec::new(), params: None, keeps_ids, is_incomplete: false }
    }

    /// Reads the transfer parameters only: of a whole reply, or of whole frames. The tokens stay unknown.
    pub(crate) fn read_params(&mut self, bytes: &[u8]) {
        let params = handoff_params::last_params(bytes).and_then(|value| serde_json::from_slice(value).ok());
        if params.is_some() {
            self.params = params;
        }
    }

    /// Reads a whole reply and returns the client's.
    pub(crate) fn read_whole(&mut self, reply: Bytes) -> Bytes {
        let fields = (reply.len() <= REPLY_BYTES_MAX).then(|| serde_json::from_slice(&reply).ok()).flatten();
        let Some(mut fields) = fields else {
            self.is_incomplete = true;
            self.read_params(&reply);
            return reply;
        };
        self.read(&mut fields);
        Value::Object(fields).to_string().into()
    }

    /// Reads whole frames of a stream and returns the client's.
    pub(crate) fn read_frames(&mut self, frames: &Bytes) -> Bytes {
        let mut out = BytesMut::with_capacity(frames.len());
        let mut passed = 0;
        for frame in sse::frames(frames) {
            let (bytes, data) = (&frames[frame.start..frame.end], frame.data(frames));
            passed = frame.end;
            let Ok(mut fields) = serde_json::from_slice::<Map<String, Value>>(&data) else {
                self.is_incomplete |= frame.has_data() && data.trim_ascii() != b"[DONE]";
                out.extend_from_slice(bytes);
                continue;
            };
            self.read(&mut fields);
            let is_kept = |line: &&[u8]| !line.is_empty() && sse::value(line, b"data").is_none();
            for line in sse::lines(bytes).filter(is_kept) {
                out.extend_from_slice(line);
                out.extend_from_slice(b"\n");
            }
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(Value::Object(fields).to_string().as_bytes());
            out.extend_from_slice(b"\n\n");
        }
        // A part of a frame that is too long for the buffer.
        self.is_incomplete |= passed < frames.len();
        out.extend_from_slice(&frames[passed..]);
        out.freeze()
    }

    fn read(&mut self, fields: &mut Map<String, Value>) {
        let params = match fields.get_mut("kv_transfer_params") {
            Some(params) => std::mem::take(params),
            None => Value::Null,
        };
        if let Value::Object(params) = params {
            self.params = Some(params);
        }
        self.read_prompt(fields);
        let choices = fields.get_mut("choices").and_then(Value::as_array_mut);
        let choices = choices.map_or(&mut [][..], Vec::as_mut_slice);
        self.is_incomplete |= choices.len() > 1;
        let Some(choice) = choices.first_mut().and_then(Value::as_object_mut) else { return };
        self.read_prompt(choice);
        match choice.get("token_ids").map(ids) {
            Some(Some(ids)) if self.output.len() + ids.len() <= TOKENS_MAX => self.output.extend(ids),
            Some(_) => self.is_incomplete = true,
            None => self.is_incomplete |= has_text(choice),
        }
        if !self.keeps_ids {
            choice.remove("token_ids");
        }
    }

    fn read_prompt(&mut self, from: &mut Map<String, Value>) {
        let known = if self.keeps_ids {
            from.get("prompt_token_ids").cloned()
        } else {
            from.remove("prompt_token_ids")
        };
        if self.prompt.is_none() {
            self.prompt = known.as_ref().and_then(ids);
        }
    }

    /// The blocks that the engine keeps.
    pub(crate) fn finish(self) -> Option<KeptBlocks> {
        let Self { prompt, output, params, is_incomplete, .. } = self;
        let params = params?;
        let text = |name: &str| params.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        let engine = text("remote_engine_id")?.to_owned();
        let names_blocks = text("remote_request_id").is_some() && text("remote_host").is_some();
        let is_set = |name: &str| params.get(name).is_some_and(|value| *value == Value::Bool(true));
        let has_blocks =
            params.get("remote_block_ids").and_then(Value::as_array).is_some_and(|ids| !ids.is_empty());
        let is_kept =
            names_blocks && has_blocks && is_set("do_remote_decode") && !is_set("do_remote_prefill");
        let kept = params.get("remote_num_tokens").and_then(Value::as_u64);
        let params = Value::Object(params).to_string();
        if !is_kept || params.len() > PARAMS_BYTES_MAX {
            return None;
        }
        let kept = kept.and_then(|kept| usize::try_from(kept).ok());
        Some(match (prompt.filter(|_| !is_incomplete), kept) {
            (Some(mut tokens), Some(kept)) if (1..=tokens.len() + output.len()).contains(&kept) => {
                tokens.extend(output);
                tokens.truncate(kept);
                KeptBlocks::Turn(EndedTurn { tokens: tokens.into(), params, engine })
            }
            _ => KeptBlocks::Unknown(params),
        })
    }
}

impl EndedTurn {
    /// The transfer parameters of a decode leg that would read the kept blocks: the engine that refuses it makes their
    /// owner free them.
    pub(crate) fn release_params(params: &str) -> Option<String> {
        let mut params: Map<String, Value> = serde_json::from_str(params).ok()?;
        params.insert("do_remote_decode".to_owned(), Value::Bool(false));
        params.insert("do_remote_prefill".to_owned(), Value::Bool(true));
        Some(Value::Object(params).to_string())
    }
}

/// Token ids; `None` if the value has anything else, or too many.
fn ids(value: &Value) -> Option<Vec<u32>> {
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    value.as_array().filter(|ids| ids.len() <= TOKENS_MAX)?.iter().map(id).collect()
}

/// Whether a choice has a part of the response.
fn has_text(choice: &Map<String, Value>) -> bool {
    let is_filled = |value: &Value| match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    };
    let message = ["delta", "message"].iter().filter_map(|name| choice.get(*name)?.as_object()).flatten();
    let mut parts = message.filter(|(name, _)| *name != "role").map(|(_, value)| value);
    choice.get("text").is_some_and(is_filled) || parts.any(is_filled)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn params(tokens: u64) -> Value {
        json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_block_ids": [[1, 2]],
            "remote_engine_id": "d-1", "remote_request_id": "chatcmpl-x", "remote_host": "10.0.0.2",
            "remote_port": 5600, "tp_size": 1, "remote_num_tokens": tokens,
        })
    }

    fn chat(params: &Value) -> Value {
        json!({
            "id": "chatcmpl-x", "prompt_token_ids": [1, 2, 3], "kv_transfer_params": params,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "token_ids": [7, 8]}],
        })
    }

    fn whole(reply: &Value, keeps_ids: bool) -> (Value, Option<KeptBlocks>) {
        let mut recorder = TurnRecorder::new(keeps_ids);
        let out = recorder.read_whole(reply.to_string().into());
        (serde_json::from_slice(&out).expect("JSON"), recorder.finish())
    }

    fn turn(blocks: Option<KeptBlocks>) -> EndedTurn {
        match blocks {
            Some(KeptBlocks::Turn(turn)) => turn,
            other => panic!("no turn: {other:?}"),
        }
    }

    #[test]
    fn a_whole_reply_has_the_tokens_of_the_kept_blocks_and_the_client_gets_none() {
        let (sent, blocks) = whole(&chat(&params(4)), false);
        let turn = turn(blocks);
        assert_eq!(turn.engine, "d-1");
        assert_eq!(&*turn.tokens, [1, 2, 3, 7], "the last token has no key and value yet");
        assert_eq!(serde_json::from_str::<Value>(&turn.params).expect("JSON"), params(4));
        assert_eq!((sent.get("prompt_token_ids"), &sent["kv_transfer_params"]), (None, &Value::Null));
        assert_eq!(sent["choices"][0].get("token_ids"), None);
        assert_eq!(sent["choices"][0]["message"]["content"], "hi");
        let (sent, _) = whole(&chat(&params(4)), true);
        assert_eq!(
            (&sent["prompt_token_ids"], &sent["choices"][0]["token_ids"]),
            (&json!([1, 2, 3]), &json!([7, 8]))
        );
    }

    #[test]
    fn a_stream_has_the_same_turn() {
        let mut recorder = TurnRecorder::new(false);
        let frames = [
            json!({"prompt_token_ids": [1, 2, 3], "choices": [{"delta": {"role": "assistant", "content": ""}}]}),
            json!({"choices": [{"delta": {"content": "h"}, "token_ids": [7]}]}),
            json!({"choices": [{"delta": {"content": "i"}, "token_ids": [8], "finish_reason": "stop"}],
                "kv_transfer_params": params(4)}),
        ];
        let text: String = frames.iter().map(|frame| format!("data: {frame}\n\n")).collect();
        let out = recorder.read_frames(&Bytes::from(text + "data: [DONE]\n\n"));
        let out = std::str::from_utf8(&out).expect("text");
        assert!(!out.contains("token_ids") && !out.contains("remote_"), "{out}");
        assert!(out.ends_with("data: [DONE]\n\n"), "{out}");
        assert_eq!(&*turn(recorder.finish()).tokens, [1, 2, 3, 7]);
    }

    fn changed(change: &dyn Fn(&mut Value)) -> Option<KeptBlocks> {
        let mut reply = chat(&params(4));
        change(&mut reply);
        whole(&reply, false).1
    }

    #[test]
    fn parameters_without_blocks_leave_nothing() {
        for (name, value) in [
            ("do_remote_decode", json!(false)),
            ("do_remote_prefill", json!(true)),
            ("remote_block_ids", json!([])),
            ("remote_engine_id", json!("")),
            ("remote_host", json!(7)),
        ] {
            let set = |reply: &mut Value| reply["kv_transfer_params"][name] = value.clone();
            assert_eq!(changed(&set), None, "{name}");
        }
        assert_eq!(changed(&|reply| reply["kv_transfer_params"] = json!("x")), None);
    }

    #[test]
    fn blocks_without_all_their_tokens_can_be_released_only() {
        let count = |count: Value| {
            move |reply: &mut Value| reply["kv_transfer_params"]["remote_num_tokens"] = count.clone()
        };
        for change in [
            &count(json!(0)) as &dyn Fn(&mut Value),
            &count(json!(6)),
            &count(Value::Null),
            &|reply| reply["prompt_token_ids"] = json!([1, -2]),
            &|reply| drop(reply.as_object_mut().expect("an object").remove("prompt_token_ids")),
            &|reply| drop(reply["choices"][0].as_object_mut().expect("an object").remove("token_ids")),
            &|reply| {
                reply["choices"] = json!([{"text": "a", "token_ids": [1]}, {"text": "b", "token_ids": [1]}])
            },
        ] {
            let blocks = changed(change);
            assert!(matches!(blocks, Some(KeptBlocks::Unknown(_))), "{blocks:?}");
        }
    }

    /// Of a Responses stream, whose tokens are not read.
    #[test]
    fn the_parameters_of_a_last_event_release_its_blocks() {
        let mut recorder = TurnRecorder::new(false);
        recorder
            .read_params(b"event: response.created\ndata: {\"response\":{\"kv_transfer_params\":null}}\n\n");
        let last = json!({"response": {"id": "resp_1", "kv_transfer_params": params(4), "output": []}});
        recorder.read_params(format!("event: response.completed\ndata: {last}\n\n").as_bytes());
        recorder.read_params(b"data: [DONE]\n\n");
        assert_eq!(recorder.finish(), Some(KeptBlocks::Unknown(params(4).to_string())));
    }

    #[test]
    fn the_parameters_of_a_release_read_the_blocks() {
        let release = EndedTurn::release_params(&params(4).to_string()).expect("parameters");
        let release: Value = serde_json::from_str(&release).expect("JSON");
        assert_eq!(
            (&release["do_remote_prefill"], &release["do_remote_decode"]),
            (&json!(true), &json!(false))
        );
        assert_eq!(release["remote_block_ids"], json!([[1, 2]]));
    }
}
