//! Marks of reasoning and solution in answers.

/// The texts that mark reasoning and solution, each with its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marks {
    pub reasoning: [String; 2],
    pub solution: [String; 2],
    /// Whether the prompt ends with the begin of the reasoning, so that answers do not have it.
    pub begins_in_prompt: bool,
}

impl Marks {
    /// The marks that an answer has, in their order.
    fn expected(&self) -> Vec<&str> {
        let all = self.reasoning.iter().chain(&self.solution).map(String::as_str);
        all.skip(usize::from(self.begins_in_prompt)).collect()
    }

    /// Whether an answer consists of reasoning and solution between their marks, in this order, with text in each.
    pub fn are_exact(&self, completion: &str) -> bool {
        if self.counts(completion).iter().any(|count| *count != 1) {
            return false;
        }
        let [begin, end] = &self.reasoning;
        let text = completion.trim();
        let text = if self.begins_in_prompt { Some(text) } else { text.strip_prefix(begin.as_str()) };
        let Some((reasoning, rest)) = text.and_then(|text| text.split_once(end.as_str())) else {
            return false;
        };
        let [begin, end] = &self.solution;
        let Some((_, rest)) = rest.split_once(begin.as_str()) else { return false };
        let Some(solution) = rest.strip_suffix(end.as_str()) else { return false };
        !reasoning.trim().is_empty() && !solution.trim().is_empty()
    }

    /// How often an answer has each mark.
    pub fn counts(&self, completion: &str) -> Vec<usize> {
        self.expected().into_iter().map(|mark| completion.matches(mark).count()).collect()
    }

    /// The text between the last marks of a solution.
    pub fn solution<'a>(&self, completion: &'a str) -> Option<&'a str> {
        let [begin, end] = &self.solution;
        let (before, _) = completion.rsplit_once(end.as_str())?;
        let (_, solution) = before.rsplit_once(begin.as_str())?;
        Some(solution)
    }
}
