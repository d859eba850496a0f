//! Prompts of a chosen length in a model's own tokens, some with shared beginnings.
//!
//! A prompt is a sequence of segments. A seed and a length determine a segment's text, wherever it stands. Text
//! consists of words whose number of tokens the endpoint reports ([`Vocabulary::learn`]).

use crate::load::request::Prompt;
use crate::load::rng::Rng;

/// A piece of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PromptSegment {
    /// Segments with the same seed have the same text.
    pub(crate) seed: u64,
    pub(crate) tokens: u32,
}

/// Short words that every English model has seen. In large vocabularies each is one token with the blank before it.
pub(crate) const WORDS: [&str; 48] = [
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not",
    "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one",
    "you", "were", "all", "her", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who",
    "will", "no", "more", "if",
];
/// How often a word is repeated to count its tokens.
pub(crate) const REPEATED: u32 = 16;

/// A prompt of `words` words after a unique first one, so that no prefix cache contains any of it. The number of
/// tokens is not exact.
pub(crate) fn plain(first: &str, words: usize, rng: &mut Rng) -> String {
    let mut text = first.to_owned();
    for _ in 1..words {
        text.push(' ');
        text.push_str(WORDS[rng.below(WORDS.len() as u64) as usize]);
    }
    text
}

/// The units of prompts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Vocabulary {
    /// Words with their cost in tokens, cheapest first, and the tokens that the endpoint adds to every prompt.
    Text { words: Vec<(&'static str, u32)>, overhead: u32 },
    /// Token ids. The endpoint adds nothing to ids.
    Ids(Vec<u32>),
}

/// Why an endpoint's tokens cannot be learnt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum VocabularyError {
    #[error("no word of ours has a fixed number of this endpoint's tokens")]
    NoWords,
    #[error("{0}")]
    Endpoint(String),
}

impl Vocabulary {
    /// Requests from `count` the tokens of each word, [`REPEATED`] times and twice that. The difference is the
    /// word's cost. The remainder of the first count is what the endpoint adds (a beginning of sequence, a chat's
    /// template).
    ///
    /// # Errors
    /// If `count` fails, or no word has a fixed cost.
    pub(crate) async fn learn<F>(
        words: &[&'static str],
        mut count: impl FnMut(String) -> F,
    ) -> Result<Self, VocabularyError>
    where
        F: Future<Output = Result<u32, String>>,
    {
        let mut learnt = Vec::new();
        for word in words {
            let once = count(repeated(word, REPEATED)).await.map_err(VocabularyError::Endpoint)?;
            let twice = count(repeated(word, 2 * REPEATED)).await.map_err(VocabularyError::Endpoint)?;
            let added = twice.saturating_sub(once);
            let cost = added / REPEATED;
            if cost > 0 && added % REPEATED == 0 && once >= added {
                learnt.push((*word, cost, once - added));
            }
        }
        // Most words agree on what is added. A word that differs is tokenized otherwise at the start of a prompt.
        let mut overheads: Vec<_> = learnt.iter().map(|(_, _, overhead)| *overhead).collect();
        overheads.sort_unstable();
        let overhead = *overheads.get(overheads.len() / 2).ok_or(VocabularyError::NoWords)?;
        let mut words: Vec<_> =
            learnt.into_iter().filter(|(_, _, own)| *own == overhead).map(|(w, c, _)| (w, c)).collect();
        words.sort_by_key(|(_, cost)| *cost);
        Ok(Self::Text { words, overhead })
    }

    /// The shortest possible prompt, in tokens.
    pub(crate) fn least(&self) -> u32 {
        match self {
            Self::Text { words, overhead } => overhead + words.first().map_or(1, |(_, cost)| *cost),
            Self::Ids(_) => 1,
        }
    }

    /// A prompt of these segments. The tokens that the endpoint adds are subtracted from the last segment.
    pub(crate) fn prompt(&self, segments: &[PromptSegment]) -> Prompt {
        match self {
            Self::Text { words, overhead } => {
                let mut text = String::new();
                let last = segments.len().saturating_sub(1);
                // A blank before each word, as when its tokens were counted.
                for (place, segment) in segments.iter().enumerate() {
                    let tokens =
                        if place == last { segment.tokens.saturating_sub(*overhead) } else { segment.tokens };
                    let least = u32::from(place == last && text.is_empty());
                    append_words(&mut text, words, segment.seed, tokens.max(least));
                }
                Prompt::Text(text)
            }
            Self::Ids(ids) => {
                let drawn = segments.iter().flat_map(|segment| {
                    let mut rng = Rng::new(segment.seed);
                    (0..segment.tokens).filter_map(move |_| ids.get(place(&mut rng, ids.len())).copied())
                });
                Prompt::Ids(drawn.collect())
            }
        }
    }
}

fn place(rng: &mut Rng, len: usize) -> usize {
    usize::try_from(rng.below(len as u64)).unwrap_or_default()
}

fn repeated(word: &str, times: u32) -> String {
    format!(" {word}").repeat(times as usize)
}

/// Appends words that cost this number of tokens. If no word is cheap enough for the rest, the rest is missing.
fn append_words(text: &mut String, words: &[(&'static str, u32)], seed: u64, tokens: u32) {
    let mut rng = Rng::new(seed);
    let mut left = tokens;
    loop {
        let affordable = words.partition_point(|(_, cost)| *cost <= left);
        // A prompt has at least one word.
        let among = if affordable == 0 && text.is_empty() && tokens > 0 { 1 } else { affordable };
        if among == 0 {
            return;
        }
        let (word, cost) = words[place(&mut rng, among)];
        text.push(' ');
        text.push_str(word);
        left = left.saturating_sub(cost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer: words of up to three letters are one token, longer ones two. It adds a beginning of sequence.
    /// `flaky` words are merged in pairs.
    fn tokens(text: &str, flaky: &str) -> u32 {
        let cost = |word: &str| if word.len() <= 3 { 1 } else { 2 };
        let words: Vec<_> = text.split_whitespace().collect();
        let merged = words.windows(2).filter(|pair| pair[0] == flaky && pair[1] == flaky).count() / 3;
        1 + words.iter().map(|word| cost(word)).sum::<u32>() - u32::try_from(merged).expect("few")
    }

    fn learn(words: &[&'static str]) -> Result<Vocabulary, VocabularyError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(Vocabulary::learn(words, |text| async move { Ok(tokens(&text, "he")) }))
    }

    #[test]
    fn a_prompt_has_the_requested_length() {
        let words = learn(&WORDS).expect("words");
        let Vocabulary::Text { words: list, overhead } = &words else { panic!("text") };
        assert!(
            *overhead == 1
                && list.iter().all(|(word, _)| *word != "he")
                && list.is_sorted_by_key(|(_, cost)| *cost)
        );
        for tokens_asked in [2, 3, 17, 512, 4_000] {
            let segments = [
                PromptSegment { seed: 1, tokens: tokens_asked / 2 },
                PromptSegment { seed: 2, tokens: tokens_asked.div_ceil(2) },
            ];
            let Prompt::Text(text) = words.prompt(&segments) else { panic!("text") };
            assert_eq!(tokens(&text, "he"), tokens_asked, "{text}");
        }
        let Prompt::Text(one) = words.prompt(&[PromptSegment { seed: 1, tokens: 1 }]) else { panic!("text") };
        assert_eq!(one.split_whitespace().count(), 1, "never empty");
        assert_eq!(words.least(), 2);
    }

    #[test]
    fn equal_segments_have_equal_text() {
        for words in [learn(&WORDS).expect("words"), Vocabulary::Ids((100..200).collect())] {
            let shared = PromptSegment { seed: 9, tokens: 64 };
            let prompt = |seed| words.prompt(&[shared, PromptSegment { seed, tokens: 32 }]);
            assert_eq!(prompt(1), prompt(1));
            assert_ne!(prompt(1), prompt(2));
            match (prompt(1), prompt(2)) {
                (Prompt::Text(a), Prompt::Text(b)) => {
                    let alike = a.split(' ').zip(b.split(' ')).take_while(|(a, b)| a == b).count();
                    assert!(alike >= 40, "{alike} words");
                }
                (Prompt::Ids(a), Prompt::Ids(b)) => {
                    assert_eq!((a.len(), a[..64] == b[..64]), (96, true));
                    assert!(a.iter().all(|id| (100..200).contains(id)));
                }
                _ => panic!("of one kind"),
            }
        }
    }

    #[test]
    fn an_endpoint_whose_tokens_cannot_be_counted_is_named() {
        assert_eq!(learn(&["he"]), Err(VocabularyError::NoWords));
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let failed = runtime.block_on(Vocabulary::learn(&WORDS, |_| async { Err("no".to_owned()) }));
        assert_eq!(failed, Err(VocabularyError::Endpoint("no".to_owned())));
    }
}
