//! The choice of a token on the host, with everything that a request can set.

use std::collections::{BTreeMap, BTreeSet};

use mt_engine::serve::{TokenChoice, TokenLogProbability};

/// Chooses the tokens of one answer.
pub struct Chooser<'a> {
    choice: &'a TokenChoice,
    /// The tokens of the prompt and the answer, and the number of times that each occurs in the answer.
    seen: BTreeMap<u32, u32>,
    seed: u64,
    num_chosen: u64,
}

/// The tokens that a step excludes.
#[derive(Clone, Copy, Default)]
pub struct Excluded<'a> {
    /// A mask of the tokens that a filter allows, 32 in each word.
    pub allowed: Option<&'a [u32]>,
    /// Tokens that may not come yet, such as those that end an answer.
    pub banned: &'a [u32],
}

impl<'a> Chooser<'a> {
    /// A chooser for an answer. `seed` is that of the request, or a random one; `answer` distinguishes the answers of one
    /// request.
    pub fn new(choice: &'a TokenChoice, prompt: &[u32], seed: u64, answer: usize) -> Self {
        let seen = prompt.iter().map(|token| (*token, 0)).collect();
        Self { choice, seen, seed: mixed(seed ^ mixed(answer as u64)), num_chosen: 0 }
    }

    /// The next token; `None` if every token is excluded.
    pub fn choose(&mut self, logits: &[f32], excluded: Excluded<'_>) -> Option<u32> {
        let token = self.draw(logits, excluded)?;
        *self.seen.entry(token).or_insert(0) += 1;
        self.num_chosen += 1;
        Some(token)
    }

    fn draw(&self, logits: &[f32], excluded: Excluded<'_>) -> Option<u32> {
        let mut scores = self.scores(logits, excluded);
        let most = scores.iter().copied().max_by(|left, right| left.1.total_cmp(&right.1));
        let (_, highest) = most?;
        if self.choice.temperature < 1e-6 {
            // The first of equal tokens, as on the device.
            return scores.iter().find(|(_, score)| *score == highest).map(|(token, _)| *token);
        }
        scores.sort_by(|left, right| right.1.total_cmp(&left.1).then(left.0.cmp(&right.0)));
        scores.truncate(self.choice.top_k.unwrap_or(usize::MAX));
        let weight = |score: f64| ((score - highest) / self.choice.temperature).exp();
        let mut weights: Vec<(u32, f64)> =
            scores.into_iter().map(|(token, score)| (token, weight(score))).collect();
        // The most probable token has the weight 1.
        weights.retain(|(_, weight)| *weight >= self.choice.min_p);
        let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
        let mut sum = 0.0;
        let kept = weights.iter().take_while(|(_, weight)| {
            let is_kept = sum == 0.0 || sum < self.choice.top_p * total;
            sum += weight;
            is_kept
        });
        let kept = kept.count();
        let total: f64 = weights[..kept].iter().map(|(_, weight)| weight).sum();
        let mut rest = self.uniform() * total;
        for (token, weight) in &weights[..kept] {
            rest -= weight;
            if rest < 0.0 {
                return Some(*token);
            }
        }
        weights[..kept].last().map(|(token, _)| *token)
    }

    /// The logits of the tokens that may be chosen, after biases and penalties.
    fn scores(&self, logits: &[f32], excluded: Excluded<'_>) -> Vec<(u32, f64)> {
        let choice = self.choice;
        let only: Option<BTreeSet<u32>> =
            choice.allowed_tokens.as_ref().map(|tokens| tokens.iter().copied().collect());
        let banned: BTreeSet<u32> = choice.banned_tokens.iter().chain(excluded.banned).copied().collect();
        let may_come = |token: &u32| {
            let masked = excluded.allowed.is_some_and(|mask| {
                mask.get(*token as usize / 32).is_none_or(|word| word >> (token % 32) & 1 == 0)
            });
            !masked && !banned.contains(token) && only.as_ref().is_none_or(|only| only.contains(token))
        };
        let mut scores: Vec<(u32, f64)> = (0..logits.len() as u32)
            .filter(may_come)
            .map(|token| (token, f64::from(logits[token as usize])))
            .collect();
        for (token, score) in &mut scores {
            for (biased, bias) in &choice.logit_bias {
                if biased == token {
                    *score += f64::from(*bias);
                }
            }
            let Some(count) = self.seen.get(token) else { continue };
            let penalty = choice.repetition_penalty;
            *score = if *score > 0.0 { *score / penalty } else { *score * penalty };
            if *count > 0 {
                *score -= choice.presence_penalty + choice.frequency_penalty * f64::from(*count);
            }
        }
        scores
    }

    /// A number from 0 to below 1, which depends on the seed and the token's index alone.
    fn uniform(&self) -> f64 {
        let bits = mixed(self.seed ^ mixed(self.num_chosen));
        (bits >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The log-probability of a token under the model, and those of the `top` most probable tokens.
pub fn log_probability(logits: &[f32], token: u32, top: usize) -> TokenLogProbability {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - highest).exp()).sum();
    let of = |token: u32| {
        let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        (f64::from(logit - highest) - sum.ln()) as f32
    };
    let mut order: Vec<u32> = Vec::new();
    if top > 0 {
        order = (0..logits.len() as u32).collect();
        let by_logit = |left: &u32, right: &u32| {
            logits[*right as usize].total_cmp(&logits[*left as usize]).then(left.cmp(right))
        };
        let top = top.min(order.len());
        if top < order.len() {
            order.select_nth_unstable_by(top, by_logit);
            order.truncate(top);
        }
        order.sort_by(by_logit);
    }
    let top = order.into_iter().map(|token| (token, of(token))).collect();
    TokenLogProbability { token, log_probability: of(token), top }
}

/// The finalizer of SplitMix64.
fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 2.0, 0.0, -1.0, 1.5];

    fn greedy() -> TokenChoice {
        TokenChoice::GREEDY
    }

    #[track_caller]
    fn check(choice: &TokenChoice, prompt: &[u32], excluded: Excluded<'_>, expected: &[u32]) {
        let mut chooser = Chooser::new(choice, prompt, 0, 0);
        let tokens: Vec<u32> =
            (0..expected.len()).filter_map(|_| chooser.choose(&LOGITS, excluded)).collect();
        assert_eq!(tokens, expected);
    }

    #[test]
    fn greedy_choices_follow_biases_and_penalties() {
        let none = Excluded::default();
        check(&greedy(), &[], none, &[1, 1]);
        check(&greedy(), &[], Excluded { banned: &[1], ..none }, &[4]);
        check(&greedy(), &[], Excluded { allowed: Some(&[0b1001]), ..none }, &[0]);
        check(&TokenChoice { logit_bias: vec![(3, 5.0)], ..greedy() }, &[], none, &[3]);
        check(&TokenChoice { allowed_tokens: Some(vec![2, 3]), ..greedy() }, &[], none, &[2]);
        check(&TokenChoice { presence_penalty: 0.8, ..greedy() }, &[], none, &[1, 4, 1]);
        check(&TokenChoice { frequency_penalty: 0.7, ..greedy() }, &[], none, &[1, 4, 1, 0]);
        check(&TokenChoice { repetition_penalty: 2.0, ..greedy() }, &[1], none, &[4, 0]);
        let any = TokenChoice { temperature: 1.0, ..TokenChoice::GREEDY };
        let mut chooser = Chooser::new(&any, &[], 0, 0);
        assert_eq!(chooser.choose(&LOGITS, Excluded { allowed: Some(&[0]), ..none }), None);
    }

    #[test]
    fn frequencies_match_probabilities() {
        let choice =
            TokenChoice { temperature: 0.7, top_p: 0.95, min_p: 0.05, top_k: Some(4), ..TokenChoice::GREEDY };
        let weights: Vec<f64> = LOGITS.iter().map(|logit| (f64::from(*logit) / 0.7).exp()).collect();
        // Token 3 is beyond `top_k`; tokens 1, 4 and 0 reach the mass of 0.95 with token 2 left out.
        let kept = [1_usize, 4, 0];
        let total: f64 = kept.iter().map(|token| weights[*token]).sum();
        let draws = 100_000;
        let mut counts = [0_u32; 5];
        let mut chooser = Chooser::new(&choice, &[], 17, 3);
        for _ in 0..draws {
            counts[chooser.choose(&LOGITS, Excluded::default()).unwrap() as usize] += 1;
        }
        assert_eq!((counts[2], counts[3]), (0, 0), "{counts:?}");
        let chi_square: f64 = kept
            .iter()
            .map(|token| {
                let expected = f64::from(draws) * weights[*token] / total;
                (f64::from(counts[*token]) - expected).powi(2) / expected
            })
            .sum();
        // p = 0.001 with two degrees of freedom.
        assert!(chi_square < 13.8, "{chi_square}: {counts:?}");
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let found = log_probability(&LOGITS, 2, 2);
        let sum: f64 = LOGITS.iter().map(|logit| f64::from(*logit).exp()).sum();
        assert!((f64::from(found.log_probability) + sum.ln()).abs() < 1e-6);
        assert_eq!(found.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 4]);
        assert!((f64::from(found.top[0].1) - (2.0 - sum.ln())).abs() < 1e-6);
    }
}
