//! Values as text in reports.

/// Formats bytes as megabytes (10^6) with three decimals.
pub(super) fn mb(bytes: Option<f64>) -> String {
    bytes.map_or("n/a".to_owned(), |b| format!("{:.3} MB", b / 1e6))
}

/// Formats milliseconds with two decimals, or with three for values below 1.
pub(crate) fn milliseconds(ms: f64) -> String {
    if ms < 1.0 {
        format!("{ms:.3}")
    } else {
        format!("{ms:.2}")
    }
}

/// Formats a measured value or a limit of a gate: bytes as megabytes, counts and ratios without a unit, rates with
/// `/s`, and all others with `unit`.
pub(super) fn quantity(value: Option<f64>, unit: &str) -> String {
    match (value, unit) {
        (None, _) => "n/a".to_owned(),
        (value, "bytes") => mb(value),
        (Some(value), "count") => number(value),
        (Some(value), "times") => format!("{value:.3}"),
        (Some(value), "per_s") => format!("{}/s", number(value)),
        (Some(value), unit) => format!("{} {unit}", number(value)),
    }
}

/// Formats whole numbers without decimals, and all others with two decimals.
fn number(x: f64) -> String {
    if x.fract() == 0.0 {
        format!("{x:.0}")
    } else {
        format!("{x:.2}")
    }
}
