//! How far step times differ from the usual one.

use std::{collections::VecDeque, time::Duration};

/// The steps whose median is the usual time.
const RECENT: usize = 100;

/// With fewer steps the median says little: the first ones are unlike the others.
const FEWEST: usize = 10;

/// The ratio to the usual time beyond which a step is far slower.
const FAR: f64 = 3.0;

/// Compares step times with their median.
pub(crate) struct Deviation {
    interval: Duration,
    recent: VecDeque<f64>,
    reported: Duration,
    /// When a slow step was last reported.
    warned: Option<Duration>,
}

/// A step's deviation, as far as it is due.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Reported {
    /// The step's time less the median, in seconds, once an interval.
    pub deviation: Option<f64>,
    /// The median, if the step was far slower; at most once an interval.
    pub usual_of_slow: Option<f64>,
}

impl Deviation {
    pub fn new(interval: Duration, now: Duration) -> Self {
        Self { interval, recent: VecDeque::new(), reported: now, warned: None }
    }

    /// Takes the time of a step that ended now.
    pub fn observe(&mut self, now: Duration, seconds: f64) -> Reported {
        let mut reported = Reported::default();
        if self.recent.len() >= FEWEST {
            let usual = median(self.recent.iter().copied());
            if now.saturating_sub(self.reported) >= self.interval {
                reported.deviation = Some(seconds - usual);
                self.reported = now;
            }
            let is_due = self.warned.is_none_or(|warned| now.saturating_sub(warned) >= self.interval);
            if seconds > FAR * usual && is_due {
                reported.usual_of_slow = Some(usual);
                self.warned = Some(now);
            }
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(seconds);
        reported
    }
}

/// The median of at least one value.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviations_are_reported_once_an_interval() {
        let mut deviation = Deviation::new(Duration::from_secs(30), Duration::ZERO);
        let mut now = Duration::ZERO;
        let mut step = |seconds: f64| {
            now += Duration::from_secs_f64(seconds);
            deviation.observe(now, seconds)
        };
        // A slow first step, then nine that alternate: the median is 2.
        assert_eq!(step(20.0), Reported::default());
        for index in 0..9 {
            assert_eq!(step(if index % 2 == 0 { 1.0 } else { 3.0 }), Reported::default());
        }
        assert_eq!(step(2.5), Reported { deviation: Some(0.5), usual_of_slow: None });
        assert_eq!(step(2.5), Reported::default(), "30 seconds are not over");
        assert_eq!(step(9.0), Reported { deviation: None, usual_of_slow: Some(2.5) });
        assert_eq!(step(9.0), Reported::default(), "a slow step was reported just now");
        assert_eq!(step(12.0).deviation, Some(9.25));
    }

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), 2.5);
    }
}
