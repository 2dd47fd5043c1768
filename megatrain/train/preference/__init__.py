"""Learning from judged answers: the losses of DPO and KTO, and the reference that they compare with."""
