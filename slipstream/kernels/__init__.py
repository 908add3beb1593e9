"""Operations on tensors, chosen once at start; knows no layer."""
