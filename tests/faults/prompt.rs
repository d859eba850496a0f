//! The clients' questions, the right response to each, and the comparison.
//!
//! The right response is that of one engine that computes everything itself without a fault: text, every token with its
//! log probability to the last digit, the finish reason, and the usage. A response must be equal to it, or be an error
//! in OpenAI's envelope, or end such that no client takes it for complete. Anything else is a violation.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{GenerateRequest, HangUp, MODEL, PendingCall, Reply, Response, Stream};
use crate::rng::FaultRng;

/// Limit for every client, whatever fails.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(25);

/// Number of questions.
const QUESTIONS: u64 = 16;

/// A question and its right response.
#[derive(Clone)]
pub(crate) struct CheckedPrompt {
    pub(crate) ask: GenerateRequest,
    pub(crate) truth: ResponseContent,
}

/// The content of a response.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ResponseContent {
    text: String,
    /// Tokens and their log probabilities, as written in the response.
    tokens: Vec<String>,
    finish_reason: Option<String>,
    usage: Option<(u64, u64)>,
}

/// The outcome of a client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientOutcome {
    /// The right response, complete.
    Right,
    /// An error in its envelope, with this status.
    Refused(u16),
    /// The stream ended with an error event.
    BrokenOff,
    /// The connection ended within the response.
    Cut,
    /// No connection, or no complete head.
    Unanswered,
    /// The client disconnected.
    Left,
}

/// The client's behaviour.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ClientBehaviour {
    Waits,
    Streams,
    /// Disconnects after this long, in this way.
    Leaves(Duration, HangUp),
}

/// The questions of a run, with the responses of the engine at `oracle`.
pub(crate) fn questions(oracle: &str) -> Vec<CheckedPrompt> {
    let ask = |at: u64| {
        let mut dice = FaultRng::new(0x0a5c, at);
        let ask = match at % 4 {
            // A chat about facts: the prompt contains the answer.
            0 | 1 => GenerateRequest::recall(usize::try_from(dice.between(4, 26)).expect("small"))
                .tokens(u32::try_from(dice.between(6, 20)).expect("small"))
                .with("logprobs", json!(true)),
            // Random tokens: nothing is cached, and every block counts.
            2 => tokens(&mut dice, 60, 400),
            // Sampled, and repeatable by its seed.
            _ => tokens(&mut dice, 20, 200).with("temperature", json!(0.8)),
        };
        ask.with("seed", json!(at))
    };
    (0..QUESTIONS).map(ask).map(|ask| CheckedPrompt::new(ask, oracle)).collect()
}

fn tokens(dice: &mut FaultRng, from: u64, to: u64) -> GenerateRequest {
    let ids: Vec<u64> = (0..dice.between(from, to)).map(|_| dice.between(6, 1499)).collect();
    let body = json!({"model": MODEL, "prompt": ids, "temperature": 0, "logprobs": 1});
    let ask = GenerateRequest { path: "/v1/completions", body };
    ask.tokens(u32::try_from(dice.between(6, 30)).expect("small"))
}

impl CheckedPrompt {
    fn new(ask: GenerateRequest, oracle: &str) -> Self {
        let reply = PendingCall::new(oracle, "POST", ask.path, ask.body.to_string().as_bytes()).reply();
        assert_eq!(reply.status, 200, "the oracle answers: {}", reply.json());
        let truth = ResponseContent::whole(&reply.json());
        assert!(truth.tokens.len() >= 6 && truth.finish_reason.is_some(), "{truth:?}");
        Self { ask, truth }
    }

    /// Sends the question and checks the response.
    ///
    /// # Errors
    /// The violation.
    pub(crate) fn put_to(&self, address: &str, manner: ClientBehaviour) -> Result<ClientOutcome, String> {
        let begun = Instant::now();
        let ask = match manner {
            ClientBehaviour::Streams => {
                self.ask.clone().streamed().with("stream_options", json!({"include_usage": true}))
            }
            ClientBehaviour::Waits | ClientBehaviour::Leaves(..) => self.ask.clone(),
        };
        let call = PendingCall::try_new(address, "POST", ask.path, ask.body.to_string().as_bytes());
        let Ok(call) = call else { return Ok(ClientOutcome::Unanswered) };
        let outcome = if let ClientBehaviour::Leaves(after, how) = manner {
            disconnect(call, after, how);
            Ok(ClientOutcome::Left)
        } else {
            match call.answer() {
                Err(_) => Ok(ClientOutcome::Unanswered),
                Ok(Response::Whole(reply)) => self.judge(&reply),
                Ok(Response::Streamed(stream)) => self.follow(stream),
            }
        };
        let took = begun.elapsed();
        if took > ANSWER_WITHIN {
            return Err(format!("a client waited for {took:?}; it fared {outcome:?}"));
        }
        outcome
    }

    fn judge(&self, reply: &Reply) -> Result<ClientOutcome, String> {
        let shown = String::from_utf8_lossy(&reply.body).into_owned();
        let body: Value =
            serde_json::from_slice(&reply.body).map_err(|error| format!("not JSON: {error}: {shown}"))?;
        if reply.status != 200 {
            // The request is valid, whatever fails behind the router.
            return match reply.status {
                429 | 502 | 503 | 504 => envelope(&body).map(|()| ClientOutcome::Refused(reply.status)),
                other => Err(format!("a good request was answered {other}: {body}")),
            };
        }
        if reply.header("content-length").is_none() && reply.header("transfer-encoding").is_none() {
            return Err(format!("an answer whose end looks like a break: {}", reply.head));
        }
        let content = ResponseContent::whole(&body);
        if content == self.truth {
            Ok(ClientOutcome::Right)
        } else {
            Err(self.wrong(&content, "a whole answer"))
        }
    }

    fn follow(&self, mut stream: Stream) -> Result<ClientOutcome, String> {
        let (mut content, mut error, mut done) = (ResponseContent::default(), false, false);
        loop {
            let event = match stream.try_event() {
                Ok(Some(event)) => event,
                Ok(None) if done => break,
                Ok(None) => return Err(self.wrong(&content, "a stream that ends without [DONE]")),
                Err(_) if done => break,
                Err(_) => return self.part(&content).map(|()| ClientOutcome::Cut),
            };
            if done {
                return Err(format!("an event after [DONE]: {event}"));
            }
            if event == "[DONE]" {
                done = true;
                continue;
            }
            let event: Value =
                serde_json::from_str(&event).map_err(|error| format!("not JSON: {error}: {event}"))?;
            if event.get("error").is_some() {
                envelope(&event)?;
                error = true;
            } else if error {
                return Err(format!("an event after the error: {event}"));
            } else {
                content.add(&event);
            }
        }
        if error {
            return self.part(&content).map(|()| ClientOutcome::BrokenOff);
        }
        if content == self.truth {
            Ok(ClientOutcome::Right)
        } else {
            Err(self.wrong(&content, "a whole stream"))
        }
    }

    /// Checks a response that broke off: it is a prefix of the right response, and does not look complete.
    fn part(&self, content: &ResponseContent) -> Result<(), String> {
        let begins =
            self.truth.text.starts_with(&content.text) && self.truth.tokens.starts_with(&content.tokens);
        let finished = content.finish_reason.is_some() && content.text != self.truth.text;
        if begins && !finished { Ok(()) } else { Err(self.wrong(content, "a stream that broke off")) }
    }

    /// Requests only the first tokens, directly from an engine and without a handoff. The engine uses its prefix cache.
    ///
    /// # Errors
    /// When the tokens differ from the right response.
    pub(crate) fn begins_right_at(&self, engine: &str) -> Result<(), String> {
        let ask = self.ask.clone().tokens(4);
        let reply = PendingCall::new(engine, "POST", ask.path, ask.body.to_string().as_bytes()).try_reply();
        let reply = reply.map_err(|error| format!("a plain request to {engine}: {error}"))?;
        let content = ResponseContent::whole(&reply.json());
        let right = reply.status == 200
            && content.tokens.len() == 4
            && self.truth.tokens.starts_with(&content.tokens);
        if right {
            Ok(())
        } else {
            Err(self.wrong(&content, &format!("a plain request to {engine} afterwards")))
        }
    }

    fn wrong(&self, content: &ResponseContent, what: &str) -> String {
        format!("wrong: {what}\n  got:   {content:?}\n  truth: {:?}\n  sent:  {}", self.truth, self.ask.body)
    }
}

impl ClientOutcome {
    /// Whether the outcome is allowed where the fault hit neither the client's connection nor the router.
    pub(crate) fn is_final(self) -> bool {
        match self {
            Self::Right | Self::Refused(_) | Self::BrokenOff | Self::Left => true,
            Self::Cut | Self::Unanswered => false,
        }
    }
}

impl ResponseContent {
    fn whole(body: &Value) -> Self {
        let mut content = Self::default();
        content.add(body);
        content
    }

    /// Adds a whole response, or one event of a stream.
    fn add(&mut self, body: &Value) {
        let number = |name: &str| body["usage"][name].as_u64();
        if let (Some(prompt), Some(completion)) = (number("prompt_tokens"), number("completion_tokens")) {
            self.usage = Some((prompt, completion));
        }
        let choice = &body["choices"][0];
        let text = [&choice["text"], &choice["message"]["content"], &choice["delta"]["content"]];
        self.text.extend(text.into_iter().filter_map(Value::as_str));
        let logprobs = &choice["logprobs"];
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        for token in list(&logprobs["content"]) {
            self.tokens.push(format!("{}{}", token["token"], token["logprob"]));
        }
        let (names, values) = (list(&logprobs["tokens"]), list(&logprobs["token_logprobs"]));
        self.tokens.extend(names.iter().zip(&values).map(|(name, value)| format!("{name}{value}")));
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
    }
}

/// Checks an error: every OpenAI client can parse it, and it names no engine.
fn envelope(body: &Value) -> Result<(), String> {
    let error = &body["error"];
    let has_text = |field: &str| error[field].as_str().is_some_and(|text| !text.is_empty());
    let whole = has_text("message")
        && has_text("type")
        && error.get("param").is_some()
        && error.get("code").is_some();
    let discreet = !body.to_string().contains("127.0.0.");
    if whole && discreet { Ok(()) } else { Err(format!("not a clear error: {body}")) }
}

#[allow(clippy::disallowed_methods, reason = "a client that waits before it disconnects")]
fn disconnect(call: PendingCall, after: Duration, how: HangUp) {
    std::thread::sleep(after);
    call.hang_up(how);
}
