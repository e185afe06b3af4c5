//! Least-squares slope of memory over the number of clones.

use serde::{Deserialize, Serialize};

/// A point of one group. Groups (rounds) may have different levels, but share one slope.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub group: u32,
    /// Number of clones.
    pub x: f64,
    /// Bytes.
    pub y: f64,
}

/// A slope and its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slope {
    pub value: f64,
    /// Interval from Student's distribution; `None` if no degrees of freedom are left.
    pub interval95: Option<(f64, f64)>,
}

/// Fits one slope to all groups, each with its own level. Returns `None` if no group has two different values of `x`.
#[must_use]
pub fn fit(points: &[Point]) -> Option<Slope> {
    let mut groups: Vec<u32> = points.iter().map(|p| p.group).collect();
    groups.sort_unstable();
    groups.dedup();
    let centred: Vec<(f64, f64)> = groups.iter().flat_map(|g| centre(points, *g)).collect();
    let xx: f64 = centred.iter().map(|(x, _)| x * x).sum();
    if xx <= 0.0 {
        return None;
    }
    let value = centred.iter().map(|(x, y)| x * y).sum::<f64>() / xx;
    let free = points.len().checked_sub(groups.len() + 1)?;
    let rest: f64 = centred.iter().map(|(x, y)| (y - value * x).powi(2)).sum();
    let interval95 = (free > 0).then(|| {
        let half = student_975(free) * (rest / free as f64 / xx).sqrt();
        (value - half, value + half)
    });
    Some(Slope { value, interval95 })
}

/// The coordinates of a group's points, relative to their means.
fn centre(points: &[Point], group: u32) -> Vec<(f64, f64)> {
    let own: Vec<&Point> = points.iter().filter(|p| p.group == group).collect();
    let n = own.len() as f64;
    let mean_x = own.iter().map(|p| p.x).sum::<f64>() / n;
    let mean_y = own.iter().map(|p| p.y).sum::<f64>() / n;
    own.iter().map(|p| (p.x - mean_x, p.y - mean_y)).collect()
}

/// The 0.975 quantile of Student's distribution: from a table for 1 to 3 degrees of freedom, otherwise from the
/// expansion of Abramowitz and Stegun 26.7.5, with an error below 0.5 %.
pub(super) fn student_975(free: usize) -> f64 {
    match free {
        1 => 12.706,
        2 => 4.303,
        3 => 3.182,
        _ => {
            let (z, f) = (1.959_964_f64, free as f64);
            let g1 = (z.powi(3) + z) / 4.0;
            let g2 = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
            let g3 = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
            z + g1 / f + g2 / f.powi(2) + g3 / f.powi(3)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn point(group: u32, x: f64, y: f64) -> Point {
        Point { group, x, y }
    }

    #[test]
    fn quantiles_of_student_match_published_tables() {
        for (free, table) in [
            (3, 3.182),
            (5, 2.571),
            (10, 2.228),
            (30, 2.042),
            (1000, 1.962),
        ] {
            let got = student_975(free);
            assert!((got / table - 1.0).abs() < 0.005, "{free}: {got}");
        }
    }

    #[test]
    fn groups_may_have_different_levels() {
        let points = [
            point(0, 0.0, 100.0),
            point(0, 10.0, 130.0),
            point(1, 0.0, 900.0),
            point(1, 10.0, 930.0),
        ];
        let slope = fit(&points).unwrap();
        assert!((slope.value - 3.0).abs() < 1e-9);
        let (low, high) = slope.interval95.unwrap();
        assert!(high - low < 1e-6);
    }

    #[test]
    fn too_few_points_give_no_slope_or_interval() {
        assert_eq!(fit(&[]), None);
        assert_eq!(fit(&[point(0, 1.0, 5.0), point(0, 1.0, 6.0)]), None);
        let two = fit(&[point(0, 0.0, 0.0), point(0, 2.0, 6.0)]).unwrap();
        assert_eq!(two.interval95, None);
    }

    proptest! {
        #[test]
        fn a_line_is_found_under_small_noise(slope in -1e6_f64..1e6, noise in prop::collection::vec(-1.0_f64..1.0, 8..40)) {
            let points: Vec<Point> = noise.iter().enumerate()
                .map(|(i, e)| point(0, i as f64, slope * i as f64 + e)).collect();
            let fitted = fit(&points).unwrap();
            prop_assert!((fitted.value - slope).abs() < 0.5);
        }
    }
}
