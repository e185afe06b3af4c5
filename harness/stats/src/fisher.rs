//! Fisher's exact test of whether an event is equally frequent in two builds.

/// Two-sided p value for `a_hits` of `a_n` against `b_hits` of `b_n`, from 0 to 1: the probability, given all four
/// margins of the 2 × 2 table, of a table that is at most as likely as the observed table (Fisher 1935, with the
/// two-sided rule of R's `fisher.test`). 1 if `a_n` or `b_n` is 0.
///
/// The test assumes independent trials.
#[must_use]
pub fn two_sided(a_hits: u64, a_n: u64, b_hits: u64, b_n: u64) -> f64 {
    let (a_hits, b_hits) = (a_hits.min(a_n), b_hits.min(b_n));
    if a_n == 0 || b_n == 0 {
        return 1.0;
    }
    let hits = a_hits + b_hits;
    let factorials = ln_factorials(a_n + b_n);
    let choose = |n: u64, k: u64| ln_choose(&factorials, n, k);
    let probability =
        |a: u64| (choose(a_n, a) + choose(b_n, hits - a) - choose(a_n + b_n, hits)).exp();
    let observed = probability(a_hits);
    // The factor keeps rounding from excluding tables that are exactly as likely as the observed table.
    let limit = observed * (1.0 + 1e-7);
    let sum: f64 = (hits.saturating_sub(b_n)..=hits.min(a_n))
        .map(probability)
        .filter(|p| *p <= limit)
        .sum();
    sum.min(1.0)
}

/// ln(0!) to ln(n!).
fn ln_factorials(n: u64) -> Vec<f64> {
    let mut sums = vec![0.0];
    let mut sum = 0.0;
    for k in 1..=n {
        sum += (k as f64).ln();
        sums.push(sum);
    }
    sums
}

fn ln_choose(factorials: &[f64], n: u64, k: u64) -> f64 {
    // All arguments are at most `a_n + b_n`, the last index of the table.
    let ln = |k: u64| usize::try_from(k).map_or(0.0, |k| factorials[k]);
    ln(n) - ln(k) - ln(n - k)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn p_values_are_those_of_r() {
        // fisher.test(matrix(c(3, 1, 1, 3), 2)), the tea-tasting table, and others.
        for (a, a_n, b, b_n, p) in [
            (3, 4, 1, 4, 0.485_714),
            (1, 10, 11, 14, 0.002_759),
            (0, 500, 0, 500, 1.0),
            (0, 1200, 6, 1200, 0.031_055),
            (5, 0, 1, 1, 1.0),
        ] {
            let got = two_sided(a, a_n, b, b_n);
            assert!((got - p).abs() < 1e-5, "{a}/{a_n} {b}/{b_n}: {got}");
        }
    }

    proptest! {
        #[test]
        fn the_order_of_the_builds_does_not_matter(
            a_n in 1_u64..200, b_n in 1_u64..200, a in 0_u64..200, b in 0_u64..200,
        ) {
            let (a, b) = (a.min(a_n), b.min(b_n));
            let p = two_sided(a, a_n, b, b_n);
            prop_assert!(p > 0.0 && p <= 1.0);
            prop_assert!((p - two_sided(b, b_n, a, a_n)).abs() < 1e-9);
            // Failures and successes are symmetric.
            prop_assert!((p - two_sided(a_n - a, a_n, b_n - b, b_n)).abs() < 1e-9);
        }
    }
}
