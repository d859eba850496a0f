//! Bodies of requests to a simulated SGLang engine, parsed and checked as far as a simulation needs.

use baton_openai::limits::COMPLETIONS_MAX_TOKENS_DEFAULT;
use baton_openai::{ApiError, Endpoint, GenerateRequest, Object, ParseLimits, parse_object};
use serde_json::Value;

use super::super::http::HttpRequest;
use super::super::text;
use super::plan::BOOTSTRAP_PORT;

/// `max_new_tokens` of `/generate` without one.
const GENERATE_MAX_TOKENS_DEFAULT: usize = 128;

/// A path that generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GeneratePath {
    OpenAi(Endpoint),
    /// SGLang's own `/generate`.
    Native,
}

impl GeneratePath {
    pub(super) fn at(path: &str) -> Option<Self> {
        if path == "/generate" { Some(Self::Native) } else { Endpoint::at(path).map(Self::OpenAi) }
    }
}

/// The fields by which a router pairs legs (`PDRoutingFields`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PairingFields {
    pub room: Option<u64>,
    /// `HOST:PORT` of P's bootstrap server.
    pub bootstrap: Option<String>,
    pub rid: Option<String>,
    /// The rank of the engine that receives the body.
    pub routed_rank: Option<usize>,
    /// P's rank, for D.
    pub prefill_rank: Option<usize>,
}

/// A parsed request.
#[derive(Debug)]
pub(super) struct SglangBody {
    pub pairing: PairingFields,
    pub stream: bool,
    pub usage: bool,
    /// Choices. All have the request's room.
    pub choices: u32,
    pub max_tokens: usize,
    pub tokens: Vec<u32>,
    pub user: Option<String>,
}

/// Parses a body. `context`: maximum tokens of prompt and response.
///
/// # Errors
/// The text of SGLang's 400.
pub(super) fn parse(path: GeneratePath, request: &HttpRequest, context: usize) -> Result<SglangBody, String> {
    let limits = ParseLimits { prompts: 1, ..ParseLimits::default() };
    let text_of = |error: ApiError| error.message;
    let fields = parse_object(&request.body, &limits).map_err(text_of)?;
    let pairing = pairing(&fields, request.data_parallel_rank.as_deref())?;
    let mut body = match path {
        GeneratePath::Native => native(&fields, pairing)?,
        GeneratePath::OpenAi(endpoint) => {
            let generate = GenerateRequest::from_map(endpoint, &fields, &limits).map_err(text_of)?;
            let tokens =
                text::prompt(&generate.input).ok_or("a simulated engine takes one prompt at a time")?;
            let rest = context.saturating_sub(tokens.len());
            let default = match endpoint {
                Endpoint::Completions => COMPLETIONS_MAX_TOKENS_DEFAULT as usize,
                Endpoint::Chat => rest,
            };
            SglangBody {
                pairing,
                stream: generate.stream,
                usage: generate.stream_options.include_usage,
                choices: generate.n,
                max_tokens: generate.max_tokens.map_or(default, |tokens| tokens as usize),
                tokens,
                user: generate.user,
            }
        }
    };
    body.max_tokens = body.max_tokens.max(1);
    let prompt = body.tokens.len();
    if prompt >= context {
        return Err(format!(
            "The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
        ));
    }
    if prompt + body.max_tokens > context {
        return Err(format!(
            "Requested token count exceeds the model's maximum context length of {context} tokens. You requested a \
             total of {} tokens: {prompt} tokens from the input messages and {} tokens for the completion.",
            prompt + body.max_tokens,
            body.max_tokens
        ));
    }
    Ok(body)
}

fn native(fields: &Object, pairing: PairingFields) -> Result<SglangBody, String> {
    let mut tokens = Vec::new();
    match (fields.get("text"), fields.get("input_ids")) {
        (Some(Value::String(text)), None) => text::tokenize(text, &mut tokens),
        (None, Some(Value::Array(ids))) => {
            let ids = ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect::<Option<Vec<_>>>();
            tokens = ids.ok_or("`input_ids` must be one list of token ids")?;
        }
        _ => return Err("Either text, input_ids or input_embeds should be provided.".to_owned()),
    }
    if tokens.is_empty() {
        tokens.push(1);
    }
    let sampling = fields.get("sampling_params");
    let number = |name: &str| sampling.and_then(|sampling| sampling[name].as_u64());
    Ok(SglangBody {
        pairing,
        stream: fields.get("stream").and_then(Value::as_bool).unwrap_or(false),
        usage: false,
        choices: number("n").and_then(|n| u32::try_from(n).ok()).unwrap_or(1),
        max_tokens: number("max_new_tokens").map_or(GENERATE_MAX_TOKENS_DEFAULT, |tokens| tokens as usize),
        tokens,
        user: fields.get("user").and_then(Value::as_str).map(str::to_owned),
    })
}

/// Parses the pairing fields. The header with the rank precedes the body's.
fn pairing(fields: &Object, rank: Option<&str>) -> Result<PairingFields, String> {
    let field = |name: &str| fields.get(name).filter(|value| !value.is_null());
    let number = |name: &str, most: u64| match field(name) {
        None => Ok(None),
        Some(value) => match value.as_u64().filter(|number| *number <= most) {
            Some(number) => Ok(Some(number)),
            None => Err(format!("`{name}` must be a number from 0 to {most}")),
        },
    };
    let text = |name: &str| match field(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(format!("`{name}` must be a text")),
    };
    let port = number("bootstrap_port", u64::from(u16::MAX))?.unwrap_or(u64::from(BOOTSTRAP_PORT));
    let routed = match rank {
        Some(rank) => Some(rank.parse().map_err(|_| format!("X-Data-Parallel-Rank: `{rank}` is no number"))?),
        None => number("routed_dp_rank", u64::from(u32::MAX))?
            .or(number("data_parallel_rank", u64::from(u32::MAX))?),
    };
    Ok(PairingFields {
        room: number("bootstrap_room", i64::MAX as u64)?,
        bootstrap: text("bootstrap_host")?.map(|host| format!("{host}:{port}")),
        rid: text("rid")?,
        routed_rank: routed.map(|rank: u64| rank as usize),
        prefill_rank: number("disagg_prefill_dp_rank", u64::from(u32::MAX))?.map(|rank| rank as usize),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(path: &str, body: &Value, rank: Option<&str>) -> Result<SglangBody, String> {
        let head = format!("POST {path} HTTP/1.1\r\n\r\n");
        let mut request = HttpRequest::read(head.as_bytes(), body.to_string().as_bytes(), false);
        request.data_parallel_rank = rank.map(str::to_owned);
        parse(GeneratePath::at(path).expect("it generates"), &request, 100)
    }

    #[test]
    fn pairing_fields_are_read_on_every_path() {
        let mut bodies = [
            ("/v1/completions", json!({"model": "any", "prompt": "a b", "max_tokens": 3})),
            (
                "/v1/chat/completions",
                json!({"messages": [{"role": "user", "content": "a b"}], "max_tokens": 3}),
            ),
            ("/generate", json!({"text": "a b", "sampling_params": {"max_new_tokens": 3}})),
        ];
        for (path, body) in &mut bodies {
            body["bootstrap_host"] = json!("[::1]");
            body["bootstrap_room"] = json!(i64::MAX);
            body["rid"] = json!("r");
            body["routed_dp_rank"] = json!(1);
            let read = parsed(path, body, None).expect("a valid body");
            let expected = PairingFields {
                room: Some(i64::MAX as u64),
                bootstrap: Some("[::1]:8998".to_owned()),
                rid: Some("r".to_owned()),
                routed_rank: Some(1),
                prefill_rank: None,
            };
            assert_eq!((read.pairing, read.max_tokens), (expected, 3), "{path}");
            assert_eq!(parsed(path, body, Some("0")).expect("a valid body").pairing.routed_rank, Some(0));
            assert!(parsed(path, body, Some("x")).is_err());
            for room in [json!(-1), json!(u64::MAX), json!([1, 2]), json!("1")] {
                body["bootstrap_room"] = room;
                assert!(parsed(path, body, None).expect_err("no room").contains("bootstrap_room"), "{path}");
            }
        }
    }

    #[test]
    fn prompt_and_response_fit_the_context() {
        let body = |words: usize, tokens: u32| json!({"prompt": "w ".repeat(words), "max_tokens": tokens});
        let long = parsed("/v1/completions", &body(100, 1), None).expect_err("too long");
        assert!(long.contains("The input (100 tokens) is longer than the model's context length"), "{long}");
        let long = parsed("/v1/completions", &body(60, 41), None).expect_err("too long");
        assert!(long.contains("a total of 101 tokens"), "{long}");
        assert!(parsed("/v1/completions", &body(60, 40), None).is_ok());
    }
}
