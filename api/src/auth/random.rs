//! Random tokens in hex.
use model::hex;

/// `N` random bytes in lower-case hex.
///
/// # Errors
/// Returns an error if the kernel provides no random bytes.
pub fn random_hex<const N: usize>() -> Result<String, getrandom::Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(hex(&bytes))
}
