//! Counts images, sounds, videos and files in a prompt, and their bytes in the body. A picture of 1 MB takes an engine
//! no more tokens than its URL does.
//!
//! The count follows the engines: an object with such a `type` in the list of a message's `content`, or of a tool's
//! `output` in `/v1/responses`. An object elsewhere, or without a `type`, is text, for example in the arguments of a
//! tool call.

use crate::scan::Scanner;

/// The media parts in one field of a body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaCounts {
    /// Number of images.
    pub images: u32,
    /// Number of sounds.
    pub sounds: u32,
    /// Number of videos.
    pub videos: u32,
    /// Number of files.
    pub files: u32,
    /// Bytes of all of them in the body.
    pub bytes: usize,
}

impl MediaCounts {
    /// Counts the media parts in a field's value, which is JSON. A value without `"type"` is not walked.
    #[must_use]
    pub fn of(value: &[u8]) -> Self {
        let mut media = Self::default();
        let mut types = memchr::memmem::find_iter(value, b"\"type\"");
        if !types.any(|at| media.clone().kind(written_after(&value[at + 6..])).is_some()) {
            return media;
        }
        let Ok(text) = std::str::from_utf8(value) else { return media };
        let mut scanner = Scanner::new(text, &());
        scanner.space();
        // Invalid JSON is counted up to its error.
        let _ = walk(&mut scanner, Member::Other, &mut media);
        media
    }

    /// The counter for a part of this type; `None` for a text or an unknown type.
    fn kind(&mut self, kind: &str) -> Option<&mut u32> {
        Some(match kind {
            "image_url" | "input_image" | "image_embeds" | "image" => &mut self.images,
            "input_audio" | "audio_url" | "audio_embeds" | "audio" => &mut self.sounds,
            "video_url" | "input_video" | "video" => &mut self.videos,
            "file" | "input_file" => &mut self.files,
            _ => return None,
        })
    }
}

/// The string value of the preceding name; empty for another value.
fn written_after(name: &[u8]) -> &str {
    let value = name.trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start);
    let text = value.and_then(|value| value.strip_prefix(b"\""));
    let text = text.and_then(|text| text.get(..memchr::memchr(b'"', &text[..text.len().min(32)])?));
    text.and_then(|text| std::str::from_utf8(text).ok()).unwrap_or_default()
}

/// The member of which a value is part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Member {
    /// `content` or `output`: the objects of its list are parts of a message.
    Content,
    Other,
}

/// Recursive. The scanner bounds the depth.
fn walk(scanner: &mut Scanner<'_>, of: Member, media: &mut MediaCounts) -> Option<()> {
    match scanner.peek()? {
        b'[' => scanner.array(|scanner, _| match scanner.peek()? {
            b'{' if of == Member::Content => part(scanner, media),
            _ => walk(scanner, Member::Other, media),
        }),
        b'{' => scanner.object(|scanner, name| match scanner.slice(name) {
            "tool_calls" | "function_call" | "arguments" => scanner.value(),
            "content" | "output" => walk(scanner, Member::Content, media),
            _ => walk(scanner, Member::Other, media),
        }),
        _ => scanner.value(),
    }
}

fn part(scanner: &mut Scanner<'_>, media: &mut MediaCounts) -> Option<()> {
    let (start, mut kind) = (scanner.offset(), "");
    scanner.object(|scanner, name| {
        if scanner.slice(name) == "type" && scanner.peek()? == b'"' {
            let text = scanner.string()?;
            kind = scanner.slice(text);
            return Some(());
        }
        scanner.value()
    })?;
    if let Some(count) = media.kind(kind) {
        *count += 1;
        media.bytes += scanner.offset() - start;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(value: &Value) -> MediaCounts {
        MediaCounts::of(value.to_string().as_bytes())
    }

    #[test]
    fn parts_of_a_message_are_counted_with_their_bytes() {
        let image = json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{}", "A".repeat(5000))}});
        let sound = json!({"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}});
        let bytes = image.to_string().len() + sound.to_string().len();
        let text = json!({"type": "text", "text": "what is this?"});
        let chat =
            json!([{"role": "system", "content": "x"}, {"role": "user", "content": [text, image, sound]}]);
        assert_eq!(of(&chat), MediaCounts { images: 1, sounds: 1, bytes, ..MediaCounts::default() });
        let items = json!([{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "http://x"},
            {"type": "input_file", "file_data": "x"}]}, {"type": "function_call_output", "output": [{"type": "input_image"}]}]);
        let found = of(&items);
        assert_eq!((found.images, found.files), (2, 1));
        let spaced = br#"[ {"content" : [ { "type" : "video_url" , "video_url" : {} } ] } ]"#;
        assert_eq!(MediaCounts::of(spaced).videos, 1);
    }

    #[test]
    fn text_content_is_not_counted_as_an_image() {
        let long = "x".repeat(1000);
        for text in [
            json!("\"type\": \"image_url\""),
            json!([{"role": "user", "content": "{\"type\":\"image_url\"}"}]),
            json!([{"role": "user", "content": [{"type": "text", "text": long, "image_url": {"type": "image_url"}}]}]),
            json!([{"role": "assistant", "tool_calls": [{"function": {"arguments":
                {"content": [{"type": "image_url", "x": long}]}}}]}]),
            json!([{"type": "image_url", "x": long}]),
            json!({"type": "image_url"}),
            json!([1, 2, 3]),
        ] {
            assert_eq!(of(&text), MediaCounts::default(), "{text}");
        }
        for broken in
            [&b"[{\"content\":[{\"type\":\"image_url\""[..], b"\"type\"", b"", b"\"type\":\"\xff\xff\""]
        {
            assert_eq!(MediaCounts::of(broken), MediaCounts::default());
        }
    }

    #[test]
    fn a_part_inside_a_part_counts_once() {
        let inner = json!({"type": "image_url", "content": [{"type": "image_url"}, {"type": "image_url"}]});
        assert_eq!(of(&json!([{"content": [inner]}])).images, 1);
    }
}
