//! Numbers as hexadecimal digits of a fixed width, written in place without a formatter.

/// Fills `text` with the lowest digits of a number, in lower case.
pub(crate) fn write(text: &mut [u8], number: u128) {
    let mut left = number;
    for digit in text.iter_mut().rev() {
        *digit = b"0123456789abcdef"[(left & 0xf) as usize];
        left >>= 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_padded_like_the_formatter() {
        for number in [0, 7, 0xabc_def0, u128::from(u64::MAX), u128::MAX - 5] {
            let (mut short, mut long) = ([0; 4], [0; 32]);
            write(&mut short, number);
            write(&mut long, number);
            assert_eq!(short, format!("{:04x}", number & 0xffff).as_bytes());
            assert_eq!(long, format!("{number:032x}").as_bytes());
        }
    }
}
