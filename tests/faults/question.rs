//! What clients ask, the truth about each, and the judgement of an answer.
//!
//! The truth is what one engine that computes everything itself, undisturbed, answers: text, every token with its
//! log probability to the last digit, the reason it ended, and the usage. An answer is right, or it says that it is
//! none: an error in OpenAI's envelope, or an end that no client can take for a good one. Anything else is a
//! violation.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::dice::Dice;
use crate::harness::{Answer, Ask, Call, HangUp, MODEL, Reply, Stream};

/// No client waits for longer than this, whatever fails.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(25);

/// Questions with a known answer.
const QUESTIONS: u64 = 16;

/// A question and its truth.
#[derive(Clone)]
pub(crate) struct Question {
    pub(crate) ask: Ask,
    pub(crate) truth: Told,
}

/// What an answer says.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Told {
    text: String,
    /// Tokens and their log probabilities, as they are written.
    tokens: Vec<String>,
    finish_reason: Option<String>,
    usage: Option<(u64, u64)>,
}

/// How a client fared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fared {
    /// The right answer, whole.
    Right,
    /// An error in its envelope, with this status.
    Refused(u16),
    /// The stream ended with an error event.
    BrokenOff,
    /// The connection ended in the middle of the answer.
    Cut,
    /// No connection, or not a whole head of an answer.
    Unanswered,
    /// The client left by itself.
    Left,
}

/// How a client behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Manner {
    Waits,
    Streams,
    /// Leaves after this long, in this way.
    Leaves(Duration, HangUp),
}

/// The questions of a run, answered by the engine at `oracle`.
pub(crate) fn questions(oracle: &str) -> Vec<Question> {
    let ask = |at: u64| {
        let mut dice = Dice::new(0x0a5c, at);
        let ask = match at % 4 {
            // A chat about facts: the answer is in the prompt.
            0 | 1 => Ask::recall(usize::try_from(dice.between(4, 26)).expect("small"))
                .tokens(u32::try_from(dice.between(6, 20)).expect("small"))
                .with("logprobs", json!(true)),
            // Tokens in no order: nothing is cached, and every block counts.
            2 => tokens(&mut dice, 60, 400),
            // Sampled, and repeatable by its seed.
            _ => tokens(&mut dice, 20, 200).with("temperature", json!(0.8)),
        };
        ask.with("seed", json!(at))
    };
    (0..QUESTIONS).map(ask).map(|ask| Question::new(ask, oracle)).collect()
}

fn tokens(dice: &mut Dice, from: u64, to: u64) -> Ask {
    let ids: Vec<u64> = (0..dice.between(from, to)).map(|_| dice.between(6, 1499)).collect();
    let body = json!({"model": MODEL, "prompt": ids, "temperature": 0, "logprobs": 1});
    let ask = Ask { path: "/v1/completions", body };
    ask.tokens(u32::try_from(dice.between(6, 30)).expect("small"))
}

impl Question {
    fn new(ask: Ask, oracle: &str) -> Self {
        let reply = Call::new(oracle, "POST", ask.path, ask.body.to_string().as_bytes()).reply();
        assert_eq!(reply.status, 200, "the oracle answers: {}", reply.json());
        let truth = Told::whole(&reply.json());
        assert!(truth.tokens.len() >= 6 && truth.finish_reason.is_some(), "{truth:?}");
        Self { ask, truth }
    }

    /// Asks, judges what comes.
    ///
    /// # Errors
    /// What makes the answer a violation.
    pub(crate) fn put_to(&self, address: &str, manner: Manner) -> Result<Fared, String> {
        let begun = Instant::now();
        let ask = match manner {
            Manner::Streams => {
                self.ask.clone().streamed().with("stream_options", json!({"include_usage": true}))
            }
            Manner::Waits | Manner::Leaves(..) => self.ask.clone(),
        };
        let call = Call::try_new(address, "POST", ask.path, ask.body.to_string().as_bytes());
        let Ok(call) = call else { return Ok(Fared::Unanswered) };
        let fared = if let Manner::Leaves(after, how) = manner {
            leave(call, after, how);
            Ok(Fared::Left)
        } else {
            match call.answer() {
                Err(_) => Ok(Fared::Unanswered),
                Ok(Answer::Whole(reply)) => self.judge(&reply),
                Ok(Answer::Streamed(stream)) => self.follow(stream),
            }
        };
        let took = begun.elapsed();
        if took > ANSWER_WITHIN {
            return Err(format!("a client waited for {took:?}; it fared {fared:?}"));
        }
        fared
    }

    fn judge(&self, reply: &Reply) -> Result<Fared, String> {
        let shown = String::from_utf8_lossy(&reply.body).into_owned();
        let body: Value =
            serde_json::from_slice(&reply.body).map_err(|error| format!("not JSON: {error}: {shown}"))?;
        if reply.status != 200 {
            // The request is a good one, whatever fails behind the router.
            return match reply.status {
                429 | 502 | 503 | 504 => envelope(&body).map(|()| Fared::Refused(reply.status)),
                other => Err(format!("a good request was answered {other}: {body}")),
            };
        }
        if reply.header("content-length").is_none() && reply.header("transfer-encoding").is_none() {
            return Err(format!("an answer whose end cannot be told from a break: {}", reply.head));
        }
        let told = Told::whole(&body);
        if told == self.truth { Ok(Fared::Right) } else { Err(self.wrong(&told, "a whole answer")) }
    }

    fn follow(&self, mut stream: Stream) -> Result<Fared, String> {
        let (mut told, mut error, mut done) = (Told::default(), false, false);
        loop {
            let event = match stream.try_event() {
                Ok(Some(event)) => event,
                Ok(None) if done => break,
                Ok(None) => return Err(self.wrong(&told, "a stream that ends without [DONE]")),
                Err(_) if done => break,
                Err(_) => return self.part(&told).map(|()| Fared::Cut),
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
                told.add(&event);
            }
        }
        if error {
            return self.part(&told).map(|()| Fared::BrokenOff);
        }
        if told == self.truth { Ok(Fared::Right) } else { Err(self.wrong(&told, "a whole stream")) }
    }

    /// An answer that broke off: what came is the beginning of the truth, and it does not look finished.
    fn part(&self, told: &Told) -> Result<(), String> {
        let begins = self.truth.text.starts_with(&told.text) && self.truth.tokens.starts_with(&told.tokens);
        let finished = told.finish_reason.is_some() && told.text != self.truth.text;
        if begins && !finished { Ok(()) } else { Err(self.wrong(told, "a stream that broke off")) }
    }

    /// Asks for the first tokens only, of an engine itself and without a handoff: what its prefix cache holds is used.
    ///
    /// # Errors
    /// When they are not those of the truth.
    pub(crate) fn begins_right_at(&self, engine: &str) -> Result<(), String> {
        let ask = self.ask.clone().tokens(4);
        let reply = Call::new(engine, "POST", ask.path, ask.body.to_string().as_bytes()).try_reply();
        let reply = reply.map_err(|error| format!("a plain request to {engine}: {error}"))?;
        let told = Told::whole(&reply.json());
        let right =
            reply.status == 200 && told.tokens.len() == 4 && self.truth.tokens.starts_with(&told.tokens);
        if right {
            Ok(())
        } else {
            Err(self.wrong(&told, &format!("a plain request to {engine} afterwards")))
        }
    }

    fn wrong(&self, told: &Told, what: &str) -> String {
        format!("wrong: {what}\n  told:  {told:?}\n  truth: {:?}\n  asked: {}", self.truth, self.ask.body)
    }
}

impl Fared {
    /// Whether a client may fare so where neither its connection nor the router was harmed.
    pub(crate) fn is_told(self) -> bool {
        match self {
            Self::Right | Self::Refused(_) | Self::BrokenOff | Self::Left => true,
            Self::Cut | Self::Unanswered => false,
        }
    }
}

impl Told {
    fn whole(body: &Value) -> Self {
        let mut told = Self::default();
        told.add(body);
        told
    }

    /// Adds a whole answer, or one event of a streamed one.
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

/// An error that every OpenAI client can read, and that names no engine.
fn envelope(body: &Value) -> Result<(), String> {
    let error = &body["error"];
    let says = |field: &str| error[field].as_str().is_some_and(|text| !text.is_empty());
    let whole =
        says("message") && says("type") && error.get("param").is_some() && error.get("code").is_some();
    let discreet = !body.to_string().contains("127.0.0.");
    if whole && discreet { Ok(()) } else { Err(format!("not a clear error: {body}")) }
}

#[allow(clippy::disallowed_methods)] // a client that loses its patience
fn leave(call: Call, after: Duration, how: HangUp) {
    std::thread::sleep(after);
    call.hang_up(how);
}
