//! Whole frames of a stream, one by one.

/// Cuts at blank lines; each piece ends with one.
pub(super) fn split(mut chunk: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        if chunk.is_empty() {
            return None;
        }
        let end = end_of_first(chunk).unwrap_or(chunk.len());
        let (frame, rest) = chunk.split_at(end);
        chunk = rest;
        Some(frame)
    })
}

fn end_of_first(chunk: &[u8]) -> Option<usize> {
    let ends = |at: &usize| chunk[..*at].ends_with(b"\n\n") || chunk[..*at].ends_with(b"\n\r\n");
    (2..=chunk.len()).find(ends)
}

/// The JSON of a frame that is one `data:` line and not `[DONE]`.
pub(super) fn json(frame: &[u8]) -> Option<&[u8]> {
    let data = frame.strip_prefix(b"data:")?.trim_ascii();
    (data.starts_with(b"{") && !data.contains(&b'\n')).then_some(data)
}

/// Whether a frame says nothing of the answer: a comment, or the end.
pub(super) fn is_empty(frame: &[u8]) -> bool {
    frame.starts_with(b":") || frame.trim_ascii() == b"data: [DONE]" || frame.trim_ascii().is_empty()
}
