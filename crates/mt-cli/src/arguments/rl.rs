//! The command for reinforcement learning: `maxtext rl`.

pub(super) const RL: &str = "\
Trains a model on answers with rewards, or resumes the run that `run_name` names.

Without keys, or with keys that only concern the run, this teaches arithmetic to
the newest run of `maxtext sft` without keys, which runs first if there is none.

Otherwise this is `maxtext train` with the preset `reinforcement`: the model
answers the prompts of `hf_train_files`, and `reward_functions` judge its answers.
`rl.loss_algo` names the algorithm: GRPO (the default), Dr. GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++,
PPO or RAFT. `rl.rollouts_path` names answers that another run or program has recorded,
one JSON object a line: the tokens of prompt and completion, the log-probabilities
of the sampler, and the reward.";

pub(super) const RL_EXAMPLES: &str = "\
Examples:
  maxtext rl
  maxtext rl load_parameters_path=maxtext_output/first hf_train_files=sums.jsonl \\
      reward_functions=exact batch_size=16 rl.num_generations=8
  maxtext rl load_parameters_path=maxtext_output/first \\
      rl.rollouts_path=rollouts.jsonl batch_size=16 rl.num_generations=8
  maxtext rl hf_model_path=Qwen3-0.6B rl.rollouts_path=rollouts.jsonl \\
      rl.loss_algo=dapo batch_size=16 rl.num_generations=8 rl.num_iterations=2";
