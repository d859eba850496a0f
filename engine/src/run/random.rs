//! Random bytes for names, handles and seeds.

/// `N` random bytes of the operating system.
///
/// # Errors
/// The system's.
pub(crate) fn random_bytes<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}
