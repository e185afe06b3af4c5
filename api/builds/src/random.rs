//! Random ids in hex.

use model::hex;

/// `N` random bytes in lower-case hex. `api::auth` has the same: `model` has no source of random bytes, because guest
/// programs and `cube-vmm` link it.
pub(crate) fn random_hex<const N: usize>() -> Result<String, getrandom::Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(hex(&bytes))
}
