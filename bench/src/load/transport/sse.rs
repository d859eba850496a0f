//! Incremental parser of server-sent events, by the WHATWG's HTML standard (section 9.2.6). Pure.

use crate::load::limits::EVENT_BYTES_MAX;

/// An event exceeds the maximum size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event has no end within {EVENT_BYTES_MAX} bytes")]
pub(crate) struct EventTooLong;

/// Splits bytes into the data of whole events.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// Bytes that are not parsed yet begin at `read`.
    buffer: Vec<u8>,
    read: usize,
    /// The data of the current event: its lines, each with a newline.
    data: Vec<u8>,
    /// The data of the last complete event.
    event: Vec<u8>,
    /// The last line ended with a carriage return. A following newline belongs to it.
    after_return: bool,
    begun: bool,
}

impl Events {
    /// Where received bytes are appended.
    pub(crate) fn buffer(&mut self) -> &mut Vec<u8> {
        if self.read > 0 {
            self.buffer.drain(..self.read);
            self.read = 0;
        }
        &mut self.buffer
    }

    /// The data of the next complete event.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>, EventTooLong> {
        loop {
            let rest = &self.buffer[self.read..];
            let Some(end) = memchr::memchr2(b'\n', b'\r', rest) else {
                let too_long = rest.len() + self.data.len() > EVENT_BYTES_MAX;
                return if too_long { Err(EventTooLong) } else { Ok(None) };
            };
            let (line, ended) = (&rest[..end], rest[end]);
            self.read += end + 1;
            let half = self.after_return && line.is_empty() && ended == b'\n';
            self.after_return = ended == b'\r';
            if half {
                continue;
            }
            let line = if self.begun { line } else { line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line) };
            self.begun = true;
            if line.is_empty() {
                // An event without data does not count.
                if self.data.pop().is_some() {
                    std::mem::swap(&mut self.event, &mut self.data);
                    self.data.clear();
                    return Ok(Some(&self.event));
                }
            } else if let Some(data) = field(line, b"data") {
                if self.data.len() + data.len() > EVENT_BYTES_MAX {
                    return Err(EventTooLong);
                }
                self.data.extend_from_slice(data);
                self.data.push(b'\n');
            }
        }
    }
}

/// The value of a line, if it has this field name.
fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    match line.strip_prefix(name)? {
        [b':', b' ', value @ ..] | [b':', value @ ..] => Some(value),
        [] => Some(&[]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(parts: &[&[u8]]) -> Result<Vec<String>, EventTooLong> {
        let (mut events, mut all) = (Events::default(), Vec::new());
        for part in parts {
            events.buffer().extend_from_slice(part);
            while let Some(event) = events.next()? {
                all.push(String::from_utf8_lossy(event).into_owned());
            }
        }
        Ok(all)
    }

    const STREAM: &[u8] = "\u{feff}data: {\"a\":1}\n\n: keep-alive\r\n\r\nevent: error\rdata:one\rdata:  two\r\rid: 7\ndata\n\n\
        retry: 1\n\ndatabase: no\ndata: [DONE]\r\n\r\ndata: cut".as_bytes();

    #[test]
    fn events_are_the_same_at_any_split() {
        let whole = ["{\"a\":1}", "one\n two", "", "[DONE]"].map(str::to_owned).to_vec();
        for cut in 0..=STREAM.len() {
            let (first, second) = STREAM.split_at(cut);
            assert_eq!(events(&[first, second]), Ok(whole.clone()), "{cut}");
        }
        let single: Vec<&[u8]> = STREAM.chunks(1).collect();
        assert_eq!(events(&single), Ok(whole));
    }

    #[test]
    fn an_event_without_an_end_is_an_error() {
        let part = vec![b'a'; 1 << 20];
        let mut parts: Vec<&[u8]> = vec![b"data: "];
        parts.extend(std::iter::repeat_n(part.as_slice(), 5));
        assert_eq!(events(&parts), Err(EventTooLong));
        let line = [b"data: ".as_slice(), &part, b"\n"].concat();
        assert_eq!(events(&std::iter::repeat_n(line.as_slice(), 5).collect::<Vec<_>>()), Err(EventTooLong));
    }
}
